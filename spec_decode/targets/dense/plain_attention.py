"""Attention in plain torch: a reference for the kernels, and what a CPU runs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.e4m3 import FP8
from vllm_graft.spec_decode.targets.dense.window import (
    WholeBatch,
    chunk_of,
    first_key,
    table_width,
    window_of,
)
from vllm_graft.spec_decode.trees.batch import DraftBatch, LatentBatch, TreeBatch

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention


def tree_attention_reference(
    batch: TreeBatch | DraftBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
) -> None:
    """The kernels' ``tree_attention`` in float32; it reads lengths on the host."""
    if isinstance(batch, DraftBatch):
        _attend_frontier(batch, out)
    else:
        _attend_trees(batch, out)


def _attend_trees(batch: TreeBatch, out: torch.Tensor) -> None:
    query, scales = _float_query(batch), (batch.k_scale, batch.v_scale)
    for (r, own), length in zip(own_rows(batch), batch.seq_lens.tolist()):
        rows = own.stop - own.start
        if rows == 0:
            continue
        prefix = length - rows
        first = first_key(prefix, batch.window, chunked=batch.chunked)
        key, value = gathered(batch.kv_cache, batch.block_table[r], length, *scales, first=first)
        visible = seen_keys(batch, own, length)
        if batch.window:
            assert batch.row_depths is not None
            depths = batch.row_depths[own].long()
            places = torch.arange(-prefix, rows, device=query.device)
            places[prefix:] = depths
            edges = [
                first_key(prefix + depth, batch.window, chunked=batch.chunked) - prefix
                for depth in depths.tolist()
            ]
            visible &= places >= torch.tensor(edges, device=query.device)[:, None]
        visible = visible[:, first:]
        found = attended(query[own], key, value, visible, batch.scale, batch.soft_cap, batch.sinks)
        out[own] = found.to(out.dtype)


def _attend_frontier(batch: DraftBatch, out: torch.Tensor) -> None:
    query, topk, slots = _float_query(batch), batch.topk, (batch.level + 1) * batch.topk
    scales = (batch.k_scale, batch.v_scale)
    for r, length in enumerate(batch.prefix_lens[: batch.num_reqs].tolist()):
        own = slice(r * topk, (r + 1) * topk)
        first = min(first_key(length + batch.level, batch.window), length)
        key, value = gathered(batch.kv_cache, batch.block_table[r], length, *scales, first=first)
        length -= first
        scratch = batch.scratch_kv[r, :slots].float()
        own_key, own_value = scratch.chunk(2, dim=-1)
        visible = torch.zeros(topk, length + slots, dtype=torch.bool, device=query.device)
        visible[:, :length] = True
        seen = batch.ancestors[r, :, : batch.level + 1].long()
        visible.scatter_(1, length + seen, True)
        key, value = torch.cat([key, own_key]), torch.cat([value, own_value])
        found = attended(query[own], key, value, visible, batch.scale, batch.soft_cap, batch.sinks)
        out[own] = found.to(out.dtype)


def write_scratch_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    scratch_kv: torch.Tensor,
    level: int,
    num_reqs: int,
    topk: int,
) -> None:
    """The kernels' ``write_scratch``."""
    rows = num_reqs * topk
    both = torch.cat([key[:rows], value[:rows]], dim=-1)
    level_slots = slice(level * topk, (level + 1) * topk)
    scratch_kv[:num_reqs, level_slots] = both.view(num_reqs, topk, *both.shape[1:])


def windowed_table_reference(
    block_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    *,
    window: int,
    max_rows: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' ``windowed_table``; it reads lengths on the host."""
    num_reqs = len(block_table)
    width = min(table_width(window, max_rows, block_size), block_table.shape[1])
    table, lens = block_table.new_zeros(num_reqs, width), kv_lens.new_zeros(num_reqs)
    starts = [0] * (num_reqs + 1) if query_start_loc is None else query_start_loc.tolist()
    for r, length in enumerate(kv_lens[:num_reqs].tolist()):
        first = max(0, length - (starts[r + 1] - starts[r]) - window) // block_size
        seen = [0, *range(max(first, 1), -(-length // block_size))] if length else []
        seen = [block for block in seen[:width] if block < block_table.shape[1]]
        table[r, : len(seen)] = block_table[r, seen]
        lens[r] = min(length - max(first - 1, 0) * block_size, width * block_size)
    return table, lens


def _float_query(batch: TreeBatch | DraftBatch) -> torch.Tensor:
    """The query in f32; an e4m3 query has a scale."""
    query = batch.query
    if query.dtype not in FP8:
        return query.float()
    query = query.view(torch.float8_e4m3fn).float()
    return query if batch.q_scale is None else query * batch.q_scale


def own_rows(batch: TreeBatch | LatentBatch) -> list[tuple[int, slice]]:
    """Each request with the rows of its tree."""
    starts = batch.query_start_loc.tolist()
    found = []
    for r, rows in enumerate(batch.num_rows[: batch.num_reqs].tolist()):
        end = starts[r + 1]
        found.append((r, slice(end - min(rows, batch.max_rows, end - starts[r]), end)))
    return found


def seen_keys(batch: TreeBatch | LatentBatch, own: slice, length: int) -> torch.Tensor:
    """Which of `length` keys the rows of a tree see, ``[rows, length]``."""
    masks = batch.row_masks[own, None]
    rows = len(masks)
    visible = torch.ones(rows, length, dtype=torch.bool, device=masks.device)
    bits = torch.arange(rows, device=masks.device)
    visible[:, length - rows :] = (masks >> bits & 1).bool()
    return visible


def cached(
    cache: torch.Tensor, blocks: torch.Tensor, length: int, first: int = 0
) -> tuple[torch.Tensor, bool]:
    """Rows of a sequence from a key on, f32 ``[length - first, heads, size]``; whether of e4m3."""
    position = torch.arange(first, length, device=cache.device)
    rows = cache[blocks[position // cache.shape[2]].long(), :, position % cache.shape[2]]
    fp8 = rows.dtype in FP8
    return rows.view(torch.float8_e4m3fn).float() if fp8 else rows.float(), fp8


def gathered(
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a sequence from a key on, each f32 ``[length - first, kv_heads, head_size]``."""
    rows, fp8 = cached(kv_cache, blocks, length, first)
    key, value = rows.chunk(2, dim=-1)
    if fp8 and k_scale is not None:
        key = key * k_scale
    if fp8 and v_scale is not None:
        value = value * v_scale
    return key, value


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor,
    scale: float, soft_cap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention of one request, all f32: ``[rows, num_heads, size of a value]``."""
    logits = _logits(query, key, scale, soft_cap).masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.float().view(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : key.shape[0]]
    return torch.einsum("hgrn,nhd->rhgd", weights, value).flatten(1, 2)


def _logits(query: torch.Tensor, key: torch.Tensor, scale: float, soft_cap: float) -> torch.Tensor:
    """Logits ``[kv_heads, group, rows, keys]``."""
    rows, _, size = query.shape
    grouped = query.view(rows, key.shape[1], -1, size)
    logits = torch.einsum("rhgd,nhd->hgrn", grouped, key) * scale
    return soft_cap * torch.tanh(logits / soft_cap) if soft_cap > 0 else logits


class TorchMetadataBuilder(AttentionMetadataBuilder[WholeBatch]):
    """Passes the common metadata on."""

    _cudagraph_support = AttentionCGSupport.NEVER
    supports_draft_decode_metadata_update = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> WholeBatch:
        return WholeBatch.of(common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: WholeBatch) -> None:
        """Do nothing: the metadata holds the persistent buffers, so it never goes stale."""


class TorchAttentionBackend(AttentionBackend):
    """Backend over a cache ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TorchMetadataBuilder]:
        return TorchMetadataBuilder


class TorchAttentionImpl(AttentionImpl[WholeBatch]):
    """Causal decoder attention, computed one request after another."""

    def __init__(self, stock: Any, num_kv_heads: int, chunk: int = 0) -> None:
        self.num_heads, self.num_kv_heads = stock.num_heads, num_kv_heads
        self.head_size, self.scale, self.kv_cache_dtype = stock.head_size, stock.scale, "auto"
        self.sliding_window, self.sinks, self.chunk = stock.sliding_window, stock.sinks, chunk

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Store K and V ``[num_tokens, num_kv_heads, head_size]`` at their slots; -1 is padding."""
        slots = slot_mapping[: key.shape[0]]
        rows = (slots >= 0).nonzero().flatten()
        block, offset = slots[rows] // kv_cache.shape[2], slots[rows] % kv_cache.shape[2]
        kv_cache[block, :, offset] = torch.cat([key[rows], value[rows]], -1).to(kv_cache.dtype)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        kv_cache: torch.Tensor, attn_metadata: WholeBatch, output: torch.Tensor,
        output_scale: torch.Tensor | None = None, output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute causal attention into `output` ``[num_tokens, num_heads, head_size]``."""
        if attn_metadata is None:
            return output.zero_()
        window, chunked = self.chunk or window_of(self), self.chunk > 0
        starts = itertools.pairwise(attn_metadata.query_start_loc.tolist())
        # Padding may follow the requests.
        each = zip(starts, attn_metadata.seq_lens.tolist(), attn_metadata.block_table)
        for (first, last), length, blocks in each:
            if last == first:
                continue
            places = range(length - last + first, length)
            edges = [first_key(place, window, chunked=chunked) for place in places]
            visible = torch.ones(len(places), length, dtype=torch.bool).tril(places.start)
            visible &= torch.arange(length) >= torch.tensor(edges)[:, None]
            # Blocks before the window may be the null block, which may hold NaN.
            keys, values = gathered(kv_cache, blocks, length, first=edges[0])
            output[first:last] = attended(
                query[first:last].float(),
                keys,
                values,
                visible[:, edges[0] :],
                self.scale,
                sinks=self.sinks,
            )
        return output


def replace(layer: Attention) -> None:
    """Give a loaded attention layer this backend in place of vLLM's CPU backend."""
    old: Any = layer.impl
    if layer.kv_cache_dtype.startswith("fp8") or getattr(old, "logits_soft_cap", 0):
        raise ConfigError(
            "--additional-config.graft.tree on a CPU supports neither --kv-cache-dtype fp8 nor "
            f"capped attention logits (kv_cache_dtype is {layer.kv_cache_dtype})"
        )
    layer.attn_backend = TorchAttentionBackend
    layer.impl = TorchAttentionImpl(old, layer.num_kv_heads, chunk_of(layer))
