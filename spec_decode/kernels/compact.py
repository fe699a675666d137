"""Makes the accepted path contiguous: its K/V in every layer of the target, and its rows."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, moved_block, next_power_of_2

_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class KVCacheTable:
    """Where the K/V of each layer lies, for kernels that move all layers in one launch.

    Rows are moved as integers of ``unit`` bytes, the widest that divide every address. The table
    holds addresses, not tensors: build it again when the caches are allocated again. `bases`: i64
    ``[num_layers]``, addresses. `layout`: i64 ``[num_layers, 7]``: strides of block, head and slot
    in units, slots per block, KV heads, units of one head's K and V, KV-cache group."""

    bases: torch.Tensor
    layout: torch.Tensor
    unit: int
    max_heads: int
    max_width: int

    @classmethod
    def build(cls, kv_caches: list[torch.Tensor], groups: list[int]) -> Self:
        """Describe caches ``[num_blocks, kv_heads, block_size, 2 * head_size]``, one per layer. The
        last stride must be 1; shapes, other strides and dtypes may differ by layer. ``groups`` has
        the KV-cache group of each layer, which is a row of ``slot_mappings``. Raises `ValueError`
        if shapes or strides are not these."""
        for cache in kv_caches:
            if cache.dim() != 4 or cache.stride(3) != 1:
                raise ValueError(
                    "a KV cache must be [num_blocks, kv_heads, block_size, 2 * head_size] with a "
                    f"contiguous last dimension, got {tuple(cache.shape)}, strides {cache.stride()}"
                )
        unit = min(_common_unit(cache) for cache in kv_caches)
        layout = []
        for cache, group in zip(kv_caches, groups, strict=True):
            size = cache.element_size()
            strides = [cache.stride(dim) * size // unit for dim in (0, 1, 2)]
            _, heads, block_size, width = cache.shape
            layout.append([*strides, block_size, heads, width * size // unit, group])
        device = kv_caches[0].device
        return cls(
            bases=torch.tensor([c.data_ptr() for c in kv_caches], device=device),
            layout=torch.tensor(layout, device=device),
            unit=unit,
            max_heads=max(row[4] for row in layout),
            max_width=max(row[5] for row in layout),
        )


def _common_unit(cache: torch.Tensor) -> int:
    size = cache.element_size()
    numbers = [cache.data_ptr(), *(cache.stride(dim) * size for dim in (0, 1, 2))]
    numbers.append(cache.shape[3] * size)
    return next(unit for unit in _UNITS if all(number % unit == 0 for number in numbers))


@Kernel
@triton.jit
def _compact_kernel(
    bases, layouts, path, num_sampled, query_start_loc, num_draft_tokens, slot_mappings,
    path_stride, slot_stride,
    UNIT: tl.constexpr, WIDTH_PAD: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    head = tl.program_id(2)
    layout = layouts + layer * 7
    drafts = tl.load(num_draft_tokens + req)
    if (head >= tl.load(layout + 4)) | (drafts == 0):
        return
    cache = tl.load(bases + layer).to(tl.pointer_type(UNIT))
    block_stride = tl.load(layout)
    slot_in_block_stride = tl.load(layout + 2)
    block_size = tl.load(layout + 3)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < tl.load(layout + 5)
    cache += head * tl.load(layout + 1) + column
    slots = slot_mappings + tl.load(layout + 6) * slot_stride
    slots += tl.load(query_start_loc + req + 1) - drafts - 1
    # The path rises and path[d] >= d, so in this order no row is read after it was overwritten.
    for d in range(1, tl.load(num_sampled + req)):
        node = tl.load(path + req * path_stride + d)
        if node != d:
            source = tl.load(slots + node)
            target = tl.load(slots + d)
            both = inside & (source >= 0) & (target >= 0)
            source_row = source // block_size * block_stride
            source_row += source % block_size * slot_in_block_stride
            target_row = target // block_size * block_stride
            target_row += target % block_size * slot_in_block_stride
            row = tl.load(cache + source_row, mask=both, other=0)
            tl.store(cache + target_row, row, mask=both)


def compact_kv(
    table: KVCacheTable, path: torch.Tensor, num_sampled: torch.Tensor,
    query_start_loc: torch.Tensor, num_draft_tokens: torch.Tensor, slot_mappings: torch.Tensor,
    num_reqs: int,
) -> None:  # fmt: skip
    """Copy the K/V of accepted node ``path[d]`` to the slot of the request's ``d``-th draft row.

    All layers take one launch. Slots of -1 are skipped.

    Args:
        path: i32 ``[>= num_reqs, width]`` by batch row, rising, ``path[0] == 0``.
        num_sampled: i32 ``[num_reqs]``, entries of ``path`` that count.
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        num_draft_tokens: i32 ``[>= num_reqs]``, 0 for a plain request.
        slot_mappings: i64 ``[num_groups, max_tokens]``, slot of each row in each KV-cache group.
    """
    if num_reqs == 0:
        return
    _compact_kernel[(num_reqs, table.bases.shape[0], table.max_heads)](
        table.bases, table.layout, path, num_sampled, query_start_loc, num_draft_tokens,
        slot_mappings, path.stride(0), slot_mappings.stride(0),
        UNIT=_UNITS[table.unit], WIDTH_PAD=next_power_of_2(table.max_width),
        num_warps=1, num_stages=1,
    )  # fmt: skip


class TokenRows(NamedTuple):
    """The rows of a batch, as the draft's extend pass reads them: i32 or i64 ids, i64 positions.
    `states` are ``[num_tokens, hidden]``, the last dimension contiguous."""

    ids: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor


@Kernel
@triton.jit(do_not_specialize=["num_reqs", "num_tokens"])
def _follow_kernel(
    path, num_sampled, query_start_loc, num_draft_tokens, ids, positions, states, moved_ids,
    moved_positions, moved_states, num_reqs, num_tokens,
    path_stride, states_stride, moved_stride,
    WIDTH: tl.constexpr, REQS_PAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Move a block of rows and columns; the first block of a row also moves ids and positions."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < num_tokens
    # A row's request is the number of queries that end before it; rows behind all are padding.
    other = tl.arange(0, REQS_PAD)
    ends = tl.load(query_start_loc + 1 + other, mask=other < num_reqs, other=2147483647)
    req = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    query = req < num_reqs
    end = tl.load(query_start_loc + 1 + req, mask=query, other=0)
    drafts = tl.load(num_draft_tokens + req, mask=query, other=0)
    accepted = tl.load(num_sampled + req, mask=query & (drafts > 0), other=0)
    first = end - drafts - 1
    place = token - first
    moved = (place >= 0) & (place < accepted)
    node = tl.load(path + req.to(tl.int64) * path_stride + place, mask=moved, other=0)
    source = tl.where(moved, first + node, token).to(tl.int64)

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    element = inside[:, None] & (column < WIDTH)[None, :]
    found = tl.load(states + source[:, None] * states_stride + column[None, :], mask=element)
    place_of = token.to(tl.int64)[:, None] * moved_stride + column[None, :]
    tl.store(moved_states + place_of, found, mask=element)
    here = inside & (tl.program_id(1) == 0)
    tl.store(moved_ids + token, tl.load(ids + source, mask=here), mask=here)
    tl.store(moved_positions + token, tl.load(positions + source, mask=here), mask=here)


def follow_path(
    path: torch.Tensor, num_sampled: torch.Tensor, query_start_loc: torch.Tensor,
    num_draft_tokens: torch.Tensor, rows: TokenRows, moved: TokenRows,
    *, num_reqs: int, num_tokens: int, max_reqs: int,
) -> None:  # fmt: skip
    """Copy rows so that accepted nodes stand in order after their root, in one launch.

    Row ``t`` stays row ``t`` except for the draft rows of a request, where row ``first + d`` is row
    ``first + path[d]`` for ``d < num_sampled``. `moved` shares no memory with `rows`, and may be
    longer; `num_tokens` counts padding after the last query; `max_reqs` is an upper bound, the same
    in each call of an engine. Other arguments are those of `compact_kv`."""
    width = rows.states.shape[1]
    if num_tokens == 0:
        return
    block_rows, columns = moved_block(width)
    _follow_kernel[(cdiv(num_tokens, block_rows), cdiv(width, columns))](
        path, num_sampled, query_start_loc, num_draft_tokens, *rows, *moved, num_reqs, num_tokens,
        path.stride(0), rows.states.stride(0), moved.states.stride(0),
        WIDTH=width, REQS_PAD=next_power_of_2(max_reqs), ROWS=block_rows, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
