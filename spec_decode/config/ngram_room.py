"""Whether a preset lets n-grams join the drafts of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_graft.spec_decode.config.chosen import drafter_of
from vllm_graft.spec_decode.config.ngram_config import NgramConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig

SHARE = 100
"""The copies of the texts may take one part in so many of a device's memory. K/V of the same
tokens take a thousand times as much, but vLLM keeps those of fewer tokens than all requests may
have."""

_BYTES = 4
"""Of a token id."""


class NgramRoom(NamedTuple):
    """What a preset decides about n-grams.

    Attributes:
        ngram: the section; None for no n-grams.
        says: why there is no room for them; empty if there is, or if nobody measured them there.
    """

    ngram: NgramConfig | None
    says: str = ""


def ngram_room(vllm_config: Any) -> NgramRoom:
    """Decide whether n-grams join a preset's trees. All of it is known before the model is loaded.

    They were measured beside drafts that grow by levels.
    """
    from vllm.platforms import current_platform

    drafter = drafter_of(TreeConfig(), vllm_config.speculative_config)
    if drafter is None or drafter.block or not drafter.has_model:
        return NgramRoom(None)
    ngram, longest = NgramConfig(), vllm_config.model_config.max_model_len
    requests = vllm_config.scheduler_config.max_num_seqs
    memory = current_platform.get_device_total_memory()
    taken = _BYTES * requests * (longest + ngram.room(longest))
    if taken * SHARE <= memory:
        return NgramRoom(ngram)
    return NgramRoom(
        None,
        f"Copies of the texts in which n-grams are looked for would take {taken / 1e9:.1f} GB with "
        f"--max-num-seqs {requests} and --max-model-len {longest}, more than a hundredth of the "
        f"device's {memory / 1e9:.0f} GB: lower one of the two.",
    )
