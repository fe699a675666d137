"""What the configuration of an XPress draft says of its refiner. VLLM knows such drafts since 0.33.

Where the checkpoint is silent, these are the values that vLLM takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DEPTH, _CANDIDATES, _RANK, _INNER = 15, 512, 256, 512


@dataclass(frozen=True)
class RefinerSizes:
    """Sizes of a refiner.

    Attributes:
        rows: rows of a block, that of the last token included.
        candidates: tokens of a position that get a bias; None for the whole vocabulary.
        rank: of the rows that are mixed.
        inner: width of the MLP.
    """

    rows: int
    candidates: int | None
    rank: int
    inner: int


def is_refined(speculative: Any) -> bool:
    """Whether the draft of vLLM's speculative config is an XPress."""
    asks = getattr(speculative, "is_xpress", None)
    return asks is not None and bool(asks())


def refiner_sizes(draft: Any) -> RefinerSizes:
    """Sizes of the refiner of an XPress draft.

    Args:
        draft: the draft's ``hf_config``.
    """
    rows = getattr(draft, "xpress_block_size", None)
    return RefinerSizes(
        rows=rows or getattr(draft, "num_speculative_steps", _DEPTH) + 1,
        candidates=getattr(draft, "xpress_topc", _CANDIDATES) or None,
        rank=getattr(draft, "xpress_rank", _RANK),
        inner=getattr(draft, "xpress_mlp_hidden", _INNER),
    )
