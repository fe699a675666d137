"""What a layer of the draft computes with a window, row by row, while an engine drafts.

The visible positions are made here from lengths alone: neither narrowed block tables nor kernels
are used. While a pass runs, all blocks that none of its rows may see hold NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.targets.dense.layer import DraftTreeMetadata, TreeAttentionMixin


@dataclass
class Compared:
    """How many rows were compared."""

    levels: int = 0
    accepted: int = 0
    narrower: int = 0
    otherwise: int = 0


@dataclass
class _Row:
    """A row of a pass: its request, its place in the query, the length before it, and what it sees.

    Attributes:
        request: row of the block table.
        place: row of the query.
        length: positions of the paged cache that it sees without a window.
        first: the first position of its window.
        own: K and V that are not in the paged cache, ``[keys, kv_heads, 2 * head_size]``.
    """

    request: int
    place: int
    length: int
    first: int
    own: torch.Tensor | None = None

    def visible(self, block: int) -> list[int]:
        return sorted({*range(min(block, self.length)), *range(self.first, self.length)})


@contextmanager
def compared(
    monkeypatch: pytest.MonkeyPatch, window: int, *, tolerance: float = 1e-4
) -> Iterator[Compared]:
    """Compare every pass of the draft's layers inside with the rows' own windows."""
    seen = Compared()
    stock = TreeAttentionMixin.forward

    def forward(self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any,
                attn_metadata: Any, output: Any, **scales: Any) -> Any:  # fmt: skip
        metadata = attn_metadata
        if not self.is_draft or metadata is None:
            return stock(self, layer, query, key, value, kv_cache, metadata, output, **scales)
        block = kv_cache.shape[2]
        is_level = isinstance(metadata, DraftTreeMetadata)
        rows = list((_level_rows if is_level else _accepted_rows)(metadata, window, block))
        whole = kv_cache.clone()
        hidden = _hidden(metadata.block_table, rows, block)
        kv_cache[hidden] = float("nan")
        stock(self, layer, query, key, value, kv_cache, metadata, output, **scales)
        kv_cache[hidden] = whole[hidden]
        for row in rows:
            if is_level:
                row.own = _own(metadata, row)
            table = metadata.block_table[row.request]
            found = [
                _attend(self, query[row.place], whole, table, places, row.own)
                for places in (row.visible(block), list(range(row.length)))
            ]
            ours = output[row.place].float().flatten()
            torch.testing.assert_close(ours, found[0].flatten(), atol=tolerance, rtol=tolerance)
            narrower = len(row.visible(block)) < row.length
            seen.narrower += narrower
            seen.otherwise += narrower and not torch.allclose(*found, atol=1e-3)
        seen.levels += is_level * len(rows)
        seen.accepted += (not is_level) * len(rows)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(TreeAttentionMixin, "forward", forward)
        yield seen


def _level_rows(metadata: DraftTreeMetadata, window: int, block: int) -> Iterator[_Row]:
    for request, length in enumerate(metadata.prefix_lens.tolist()):
        first = max(0, length - window) // block * block
        for node in range(metadata.topk):
            yield _Row(request, request * metadata.topk + node, length, first)


def _accepted_rows(metadata: Any, window: int, block: int) -> Iterator[_Row]:
    starts = metadata.query_start_loc.tolist()
    for request, length in enumerate(metadata.seq_lens.tolist()):
        rows = starts[request + 1] - starts[request]
        first = max(0, length - rows - window) // block * block
        for row in range(rows):
            yield _Row(request, starts[request] + row, length - rows + row + 1, first)


def _own(metadata: DraftTreeMetadata, row: _Row) -> torch.Tensor:
    seen = metadata.ancestors[row.request, row.place % metadata.topk, : metadata.level + 1]
    return metadata.scratch[row.request, seen.long()]


def _hidden(table: torch.Tensor, rows: list[_Row], block: int) -> torch.Tensor:
    """Blocks of the cache in which no row sees a position."""
    table = table.cpu()
    seen = {int(table[row.request, at // block]) for row in rows for at in row.visible(block)}
    every = {int(table[row.request, at // block]) for row in rows for at in range(row.length)}
    return torch.tensor(sorted(every - seen), dtype=torch.int64)


def _attend(
    impl: Any,
    query: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    places: list[int],
    own: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one row ``[num_heads, head_size]`` over these positions and its own keys."""
    at = torch.tensor(places, dtype=torch.int64, device=cache.device)
    rows = cache[table[at // cache.shape[2]].long(), :, at % cache.shape[2]]
    if own is not None:
        rows = torch.cat([rows, own])
    key, value = rows.float().repeat_interleave(len(query) // rows.shape[1], 1).chunk(2, -1)
    weights = (torch.einsum("hd,nhd->hn", query.float(), key) * impl.scale).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, value)
