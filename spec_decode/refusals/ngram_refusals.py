"""What trees of n-grams alone can't be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Refusal
from vllm_graft.spec_decode.config.ngram_config import MAX_LENGTH
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import has_model

_LENGTH = "prompt_lookup_max"


def _lengths(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    longest = getattr(speculative, _LENGTH, None)
    if longest is not None and longest > MAX_LENGTH and not has_model(tree, speculative):
        yield (
            f"speculative_config.{_LENGTH} is {longest}, but trees tell lengths of up to "
            f"{MAX_LENGTH} tokens apart: set it to {MAX_LENGTH} or less."
        )


def _beside(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if tree.ngram is None or has_model(tree, speculative):
        return
    # How long references are, vLLM has no key for.
    if tree.ngram.model_fields_set != {"reference"}:
        yield (
            f"{flag('tree', 'ngram')} adds n-grams to what a draft model drafts, but "
            f"speculative_config.method is {speculative.method!r}: drop it, or all of it but "
            f"'reference', and give the lengths as prompt_lookup_min and {_LENGTH} of the "
            "speculative config."
        )


def _head(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    if has_model(tree, vllm_config.speculative_config):
        return
    asked = [("hot_tokens", tree.hot_tokens), ("head_dtype", tree.head_dtype)]
    for key, value in asked:
        if value not in (None, "auto"):
            yield (f"{flag('tree', key)} is {value!r}, but n-grams have no output head: drop it.")


def _filled(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    nodes = tree.nodes or speculative.num_speculative_tokens
    given = "steps" in tree.model_fields_set or tree.nodes is None
    steps = tree.steps if given else speculative.num_speculative_tokens
    if nodes > tree.topk * steps and not has_model(tree, speculative):
        yield (
            f"{flag('tree', 'topk')} is {tree.topk}, and the depth {steps}: so many matches have "
            f"{tree.topk * steps} tokens, which can't fill {nodes} nodes. Ask for fewer nodes, or "
            "for more matches or depth."
        )


NGRAMS: tuple[Refusal, ...] = (
    Refusal(
        f"`method: ngram` with a `{_LENGTH}` of more than {MAX_LENGTH}",
        "Rates are learned for each length of a match.",
        f"set `{_LENGTH}` to {MAX_LENGTH} or less",
        _lengths,
    ),
    Refusal(
        "`ngram` beside `method: ngram`",
        "The key is for n-grams beside a draft model; `reference` alone goes with both.",
        f"drop `ngram`, or all of it but `reference`, and set `prompt_lookup_min` and `{_LENGTH}`",
        _beside,
    ),
    Refusal(
        "`hot_tokens` or `head_dtype: fp8` with `method: ngram`",
        "There is no output head.",
        "drop the key",
        _head,
    ),
    Refusal(
        "`method: ngram` with more nodes than `topk` matches of `steps` tokens have",
        "Nothing could fill the tree.",
        "lower the number of nodes, or raise `topk` or the depth",
        _filled,
    ),
)
