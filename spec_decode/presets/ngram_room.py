"""Whether a preset lets n-grams join the drafts of a model."""

from __future__ import annotations

from typing import Any

from vllm_graft.spec_decode.config.ngram_config import NgramConfig
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.models.chosen import grows_by_levels

SHARE = 100
"""The copies of the texts may take one part in so many of a device's memory. K/V of the same tokens
take a thousand times as much, but vLLM keeps those of fewer tokens than requests may have."""


def ngram_room(vllm_config: Any) -> NgramConfig | str:
    """The n-grams of a preset's trees, or why there is no room for them: empty for drafts that do
    not grow by levels, beside which nobody measured them. No model is loaded yet."""
    from vllm.platforms import current_platform

    if not grows_by_levels(TreeConfig(), vllm_config.speculative_config):
        return ""
    ngram = NgramConfig()
    taken, memory = text_bytes(ngram, vllm_config), current_platform.get_device_total_memory()
    if taken * SHARE <= memory:
        return ngram
    return (
        f"Copies of the texts in which n-grams are looked for would take {taken / 1e9:.1f} GB with "
        f"--max-num-seqs {vllm_config.scheduler_config.max_num_seqs} and --max-model-len "
        f"{vllm_config.model_config.max_model_len}, more than a hundredth of the device's "
        f"{memory / 1e9:.0f} GB: lower one of the two."
    )


def text_bytes(ngram: NgramConfig, vllm_config: Any, *, matches: int = 1) -> int:
    """Device bytes on each rank of the requests' texts and of what is learned from them, with so
    many matches of each text."""
    import torch

    from vllm_graft.spec_decode.trees.ngram_state import NgramState

    width = vllm_config.model_config.max_model_len
    return NgramState.allocate(
        ngram.min,
        ngram.max,
        vllm_config.scheduler_config.max_num_seqs,
        width,
        torch.device("meta"),
        matches=matches,
        reference=ngram.room(width),
    ).num_bytes
