"""What trees of n-grams alone can't be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.spec_decode.config.ngram_config import MAX_LENGTH
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import has_model

_LENGTH = "speculative_config.prompt_lookup_max"

NGRAMS = Refusals()


@NGRAMS.row(
    f"`method: ngram` with a `prompt_lookup_max` of more than {MAX_LENGTH}",
    "Rates are learned for each length of a match.",
    f"set `{_LENGTH}` to {MAX_LENGTH} or less",
)
def _lengths(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    longest = getattr(speculative, "prompt_lookup_max", None)
    if longest is not None and longest > MAX_LENGTH and not has_model(tree, speculative):
        yield f"{_LENGTH} is {longest}"


@NGRAMS.row(
    "`ngram` beside `method: ngram`",
    "The key is for n-grams beside a draft model; `reference` alone goes with both.",
    f"drop `{flag('tree', 'ngram')}`, or all of it but `reference`, and give the lengths as "
    f"`speculative_config.prompt_lookup_min` and `{_LENGTH}`",
)
def _beside(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    if tree.ngram is None or has_model(tree, speculative):
        return
    # How long references are, vLLM has no key for.
    if tree.ngram.model_fields_set != {"reference"}:
        yield (
            f"{flag('tree', 'ngram')} is given, and speculative_config.method is "
            f"{speculative.method!r}"
        )


@NGRAMS.row(
    "`hot_tokens` or `head_dtype: fp8` with `method: ngram`",
    "N-grams have no output head.",
    "drop the key",
)
def _head(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    if has_model(tree, vllm_config.speculative_config):
        return
    for key, value in (("hot_tokens", tree.hot_tokens), ("head_dtype", tree.head_dtype)):
        if value not in (None, "auto"):
            name = flag("tree", key)
            yield Found(f"{name} is {value!r} without a draft model", f"drop {name}")


@NGRAMS.row(
    "`method: ngram` with more nodes than `topk` matches of `steps` tokens have",
    "Nothing could fill the tree.",
    f"ask for fewer nodes, raise `{flag('tree', 'topk')}`, or ask for a deeper tree",
)
def _filled(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    nodes = tree.nodes or speculative.num_speculative_tokens
    given = "steps" in tree.model_fields_set or tree.nodes is None
    steps = tree.steps if given else speculative.num_speculative_tokens
    if nodes > (most := tree.topk * steps) and not has_model(tree, speculative):
        yield (
            f"{flag('tree', 'topk')} is {tree.topk}, and the depth {steps}, so that matches have "
            f"{most} tokens for {nodes} nodes"
        )
