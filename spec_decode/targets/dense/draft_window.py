"""What a layer of the draft sees of a long text: its first block, and a window before the tree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
from vllm_graft.spec_decode.kernels.attention.windowed_table import windowed_table

if TYPE_CHECKING:
    import torch

    from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata

Narrow = Callable[..., tuple["torch.Tensor", "torch.Tensor"]]
"""A function like `windowed_table`."""


class DraftWindow:
    """Narrows the metadata of one layer's passes to the first block and those of the last `tokens`.

    The kernels are not told: to them a request is a shorter text. All rows of a pass share one
    window, which ends at the first of them. So the rows of a prompt's part see that part besides.
    """

    def __init__(self, tokens: int, narrow: Narrow = windowed_table) -> None:
        self.narrow = functools.partial(narrow, window=tokens)
        self._levels: tuple[torch.Tensor, torch.Tensor] | None = None
        """The tables of the tree that is growing, which all of its levels share."""

    def of_extend(self, metadata: Any, block_size: int) -> Any:
        """The metadata of a pass over a prompt, or over the rows that the target has accepted."""
        table, lens = self.narrow(
            metadata.block_table,
            metadata.seq_lens,
            metadata.query_start_loc,
            max_rows=metadata.max_query_len,
            block_size=block_size,
        )
        changed = {
            "block_table": table,
            "seq_lens": lens,
            "max_seq_len": min(metadata.max_seq_len, table.shape[1] * block_size),
        }
        if getattr(metadata, "scheduler_metadata", None) is not None:
            # FlashAttention's schedule was made for whole texts. Without one its launch makes one.
            changed["scheduler_metadata"] = None
        return dataclasses.replace(metadata, **changed)

    def of_level(self, metadata: DraftTreeMetadata, block_size: int) -> DraftTreeMetadata:
        """The metadata of a level; the levels of a tree come in their order, the first is 0."""
        if metadata.level == 0 or self._levels is None:
            # In a graph the first level makes the tables anew, and the others read them there.
            self._levels = self.narrow(
                metadata.block_table, metadata.prefix_lens, None, max_rows=0, block_size=block_size
            )
        table, lens = self._levels
        return dataclasses.replace(
            metadata,
            block_table=table,
            prefix_lens=lens,
            max_seq_len=min(metadata.max_seq_len, table.shape[1] * block_size),
        )


def refuse_window(name: str, kind: str) -> None:
    """Refuse a window over a layer of the draft that can't have one."""
    raise ConfigError(
        f"{flag('tree', 'draft_window')} needs a draft of plain attention over whole texts, but "
        f"layer {name} {kind}: drop the key"
    )
