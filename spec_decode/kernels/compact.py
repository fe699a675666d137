"""Makes the K/V of the accepted path contiguous in every layer of the target."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2

_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class KVCacheTable:
    """Where the K/V of each layer lies, for kernels that move all layers in one launch.

    Rows are moved as integers of ``unit`` bytes, the widest that divide every address. The table
    holds addresses, not tensors: build it again when the caches are allocated again.

    Attributes:
        bases: i64 ``[num_layers]``, addresses.
        layout: i64 ``[num_layers, 7]``: strides of block, head and slot in units, slots per block,
            KV heads, units of one head's K and V, KV-cache group.
        unit: Bytes of a unit.
        max_heads: Most KV heads of a layer.
        max_width: Most units of a head's K and V.
    """

    bases: torch.Tensor
    layout: torch.Tensor
    unit: int
    max_heads: int
    max_width: int

    @classmethod
    def build(cls, kv_caches: list[torch.Tensor], groups: list[int]) -> KVCacheTable:
        """Describe ``kv_caches``.

        Args:
            kv_caches: A tensor ``[num_blocks, kv_heads, block_size, 2 * head_size]`` per layer. The
                last stride must be 1; shapes, other strides and dtypes may differ by layer.
            groups: KV-cache group of each layer, which is a row of ``slot_mappings``.

        Raises:
            ValueError: if there are no caches, or shapes, strides or counts are not these.
        """
        if not kv_caches or len(kv_caches) != len(groups):
            raise ValueError(f"{len(kv_caches)} KV caches but {len(groups)} groups")
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
    bases,
    layouts,
    path,
    num_sampled,
    query_start_loc,
    num_draft_tokens,
    slot_mappings,
    path_stride,
    slot_stride,
    UNIT: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
):
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
    table: KVCacheTable,
    path: torch.Tensor,
    num_sampled: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    slot_mappings: torch.Tensor,
    num_reqs: int,
) -> None:
    """Copy the K/V of accepted node ``path[d]`` to the slot of the request's ``d``-th draft row.

    All layers take one launch. Slots of -1 are skipped.

    Args:
        table: The target's layers.
        path: i32 ``[>= num_reqs, width]`` by batch row, rising, ``path[0] == 0``.
        num_sampled: i32 ``[num_reqs]``, entries of ``path`` that count.
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        num_draft_tokens: i32 ``[num_reqs]``, 0 for a plain request.
        slot_mappings: i64 ``[num_groups, max_tokens]``, slot of each row in each KV-cache group.
        num_reqs: Batch rows.
    """
    if num_reqs == 0:
        return
    _compact_kernel[(num_reqs, table.bases.shape[0], table.max_heads)](
        table.bases,
        table.layout,
        path,
        num_sampled,
        query_start_loc,
        num_draft_tokens,
        slot_mappings,
        path.stride(0),
        slot_mappings.stride(0),
        UNIT=_UNITS[table.unit],
        WIDTH_PAD=next_power_of_2(table.max_width),
        num_warps=1,
        num_stages=1,
    )
