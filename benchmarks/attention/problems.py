"""Random batches of trees in the shape of a layer, several of them over blocks of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from benchmarks.attention.shapes import DTYPE, KvLayer, LatentLayer, Layer
from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
from vllm_graft.spec_decode.targets.dense.two_pass import Point, random_masks
from vllm_graft.spec_decode.targets.dense.window import first_key
from vllm_graft.spec_decode.trees.batch import LatentBatch, TreeBatch

_ABSORBED = 128
"""Numbers of a head's query that meet latents, in DeepSeek's models."""

Batch = TreeBatch | LatentBatch
AnyBatch = TypeVar("AnyBatch", TreeBatch, LatentBatch)

COLD_BYTES = 512 << 20
"""Least size of a cache: calls of a graph read other blocks than the calls before them, so that no
keys are in the L2 cache, as in a model, where each layer has a cache of its own."""

CACHE_BYTES = 4 << 30
"""Most bytes of a cache. What needs more shares blocks."""


def problems(
    layer: Layer,
    point: Point,
    copies: int,
    device: torch.device | str,
    *,
    cold_bytes: int = COLD_BYTES,
    cache_bytes: int = CACHE_BYTES,
) -> list[TreeBatch] | list[LatentBatch]:
    """Batches that differ in their block tables alone.

    Args:
        layer: the layer.
        point: requests, rows of each one's tree, and keys of each, the tree's among them.
        copies: number of batches.
        device: where they are.
        cold_bytes: as `COLD_BYTES`.
        cache_bytes: as `CACHE_BYTES`.

    Raises:
        ValueError: a tree has more rows than there are keys.
    """
    if point.rows > point.context:
        raise ValueError(f"{point.rows} rows do not fit a context of {point.context}")
    generator = torch.Generator().manual_seed(0)
    block_bytes = layer.block_size * layer.key_bytes
    first = first_key(point.context - point.rows, layer.window) // layer.block_size
    used = point.num_reqs * (cdiv(point.context, layer.block_size) - first)
    pool = min(max(used, cold_bytes // block_bytes), max(1, cache_bytes // block_bytes))
    order = torch.randperm(pool, generator=generator).to(device, torch.int32)
    tables = []
    for number in range(copies):
        places = (torch.arange(used, device=device) + number * used) % pool
        read = order[places].view(point.num_reqs, -1)
        # Blocks before the window are the null block, which is the last one here.
        null = torch.full((point.num_reqs, first), pool, dtype=torch.int32, device=device)
        tables.append(torch.cat([null, read], 1))
    make = _latents if isinstance(layer, LatentLayer) else _keys
    batch = make(layer, point, pool + 1, generator, device)  # type: ignore[arg-type]
    return [replace(batch, block_table=table) for table in tables]  # type: ignore[return-value]


def chain_of(batch: AnyBatch) -> AnyBatch:
    """The batch with chains in place of its trees: what a kernel without a mask computes."""
    rows = batch.max_rows
    ones = torch.ones(rows, rows, dtype=torch.int64, device=batch.row_masks.device)
    bits = ones.cumsum(0) - 1
    masks = (ones.tril() << bits.T).sum(1).repeat(batch.num_reqs)
    if isinstance(batch, LatentBatch):
        return replace(batch, row_masks=masks)
    depths = torch.arange(rows, dtype=torch.int32, device=masks.device).repeat(batch.num_reqs)
    return replace(batch, row_masks=masks, row_depths=depths)


def _keys(
    layer: KvLayer,
    point: Point,
    blocks: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> TreeBatch:
    cache = _cache((blocks, layer.kv_heads, layer.block_size, 2 * layer.head_size), device)
    # A slice of what the fused projection of queries, keys and values makes.
    heads = layer.heads + 2 * layer.kv_heads
    wide = torch.randn(point.num_reqs * point.rows, heads, layer.head_size, generator=generator)
    masks, depths = _trees(point, generator)
    sinks = torch.randn(layer.heads, generator=generator) if layer.sinks else None
    return TreeBatch(
        query=wide.to(device, DTYPE)[:, : layer.heads],
        kv_cache=cache,
        query_start_loc=_starts(point, device),
        seq_lens=_filled(point, point.context, device),
        prefix_lens=_filled(point, point.context - point.rows, device),
        block_table=torch.empty(0),
        row_masks=masks.to(device),
        row_depths=depths.to(device),
        num_rows=_filled(point, point.rows, device),
        max_rows=point.rows,
        max_seq_len=point.context,
        scale=layer.head_size**-0.5,
        window=layer.window,
        sinks=None if sinks is None else sinks.to(device, DTYPE),
    )


def _latents(
    layer: LatentLayer,
    point: Point,
    blocks: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> LatentBatch:
    width, rows = layer.rank + layer.rope, point.num_reqs * point.rows
    masks, _ = _trees(point, generator)

    def query(size: int) -> torch.Tensor:
        return torch.randn(rows, layer.heads, size, generator=generator).to(device, DTYPE)

    return LatentBatch(
        query=query(layer.rank),
        # A slice of the projection, behind the part that is absorbed.
        query_rope=query(_ABSORBED + layer.rope)[..., _ABSORBED:],
        latents=_cache((blocks, layer.block_size, width), device),
        query_start_loc=_starts(point, device),
        prefix_lens=_filled(point, point.context - point.rows, device),
        block_table=torch.empty(0),
        row_masks=masks.to(device),
        num_rows=_filled(point, point.rows, device),
        max_rows=point.rows,
        max_seq_len=point.context,
        scale=width**-0.5,
    )


def _cache(size: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """Random blocks, and a last one of zeros."""
    generator = torch.Generator(device).manual_seed(0)
    cache = torch.empty(size, dtype=DTYPE, device=device).normal_(generator=generator)
    cache[-1] = 0
    return cache


def _trees(point: Point, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks i64 and depths i32 of one random tree, for all requests."""
    masks = random_masks(point.rows, generator)
    depths = (masks[:, None] >> torch.arange(64) & 1).sum(1) - 1
    return masks.repeat(point.num_reqs), depths.to(torch.int32).repeat(point.num_reqs)


def _starts(point: Point, device: torch.device | str) -> torch.Tensor:
    rows = point.num_reqs * point.rows
    return torch.arange(0, rows + 1, point.rows, dtype=torch.int32, device=device)


def _filled(point: Point, value: int, device: torch.device | str) -> torch.Tensor:
    return torch.full((point.num_reqs,), value, dtype=torch.int32, device=device)
