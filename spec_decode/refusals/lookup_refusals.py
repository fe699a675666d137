"""What n-grams of texts, and a memory of them, can't be asked for."""

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.spec_decode.config.tree_config import MAX_LENGTH, MAX_REFERENCE, TreeConfig
from vllm_graft.spec_decode.lookup.corpora import ROOM, read_texts, room_of
from vllm_graft.spec_decode.models.drafts import has_model
from vllm_graft.spec_decode.trees.text_state import MAX_PLACE, SEGMENT, bytes_of

_LENGTH = "speculative_config.prompt_lookup_max"

LOOKUPS = Refusals()


@LOOKUPS.row(
    f"`method: ngram` with a `prompt_lookup_max` of more than {MAX_LENGTH}",
    "Rates are learned for each length of a match.",
    f"set `{_LENGTH}` to {MAX_LENGTH} or less",
)
def _lengths(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    speculative = vllm_config.speculative_config
    longest = getattr(speculative, "prompt_lookup_max", None)
    if longest is not None and longest > MAX_LENGTH and not has_model(tree, speculative):
        yield f"{_LENGTH} is {longest}"


@LOOKUPS.row(
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


@LOOKUPS.row(
    "`memory` without `ngram`, beside a draft model",
    "What is found in it are n-grams.",
    f"set `{flag('tree', 'ngram')}` to true",
)
def _memory(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    alone = not has_model(tree, vllm_config.speculative_config)
    if tree.memory is not None and tree.ngram is None and not alone:
        yield f"{flag('tree', 'memory')} is given, and {flag('tree', 'ngram')} is not"


@LOOKUPS.row(
    "`memory` of less than two segments of 64 tokens for each request, or of more tokens than "
    "places are counted",
    "Each running request writes into a segment of its own, and places are numbers of 25 bits.",
    f"change `{flag('tree', 'memory', 'bytes')}`",
)
def _memory_size(tree: TreeConfig, vllm_config: Any) -> Iterator[Found | str]:
    if tree.memory is None:
        return
    key, requests = flag("tree", "memory", "bytes"), vllm_config.scheduler_config.max_num_seqs
    least, given = bytes_of(2 * requests, requests), int(tree.memory.bytes)
    texts = vllm_config.model_config.max_model_len + MAX_REFERENCE + room_of(tree.memory)
    most = bytes_of((MAX_PLACE - texts) // SEGMENT, requests)
    if most < least:
        taken = int(tree.memory.corpora_bytes)
        yield Found(f"{ROOM} is {taken}, which leaves no place to {key}", f"lower {ROOM}")
    elif not least <= given <= most:
        yield f"{key} is {given}, and with --max-num-seqs {requests} it may be {least} to {most}"


@LOOKUPS.row(
    "files of `memory.corpora` that can't be read, or without `corpora_bytes`",
    "A server has the corpora that it names from its start on.",
    f"change `{flag('tree', 'memory', 'corpora')}`",
)
def _corpora(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    if tree.memory is None:
        return
    for path in tree.memory.corpora:
        if not room_of(tree.memory):
            yield Found(f"{ROOM} is {int(tree.memory.corpora_bytes)}", f"set {ROOM} to 64MiB")
            return
        try:
            read_texts(path, room_of(tree.memory))
        except ConfigError as refused:
            yield Found(str(refused))
