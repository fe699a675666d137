"""Random trees and levels of drafts, and what outputs of attention kernels are compared by."""

from dataclasses import dataclass
from typing import Any

import torch

from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
from vllm_graft.spec_decode.targets.dense.two_pass import random_masks
from vllm_graft.spec_decode.targets.dense.window import first_key
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

UNTOUCHED = 77.0
"""Fills an output before a kernel runs: rows that are not computed keep it."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error of an output in the interpreter: half a unit in the last place of the output, whose
values reach 6, and of the softmax weights."""


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a problem.

    Attributes:
        rows: tree rows of each request, 0 for one that the kernel must skip.
        lens: keys of each request: of a tree with its own rows, of a draft its prefix.
        group: query heads per KV head.
        slots_first: whether memory holds a block as ``[slot, head]`` (NHD), else ``[head, slot]``.
        max_blocks: requests share blocks when they need more than this many.
        window: as in `TreeBatch`. Blocks before it hold NaN, as the null block of an engine may.
    """

    rows: tuple[int, ...]
    lens: tuple[int, ...]
    kv_heads: int = 1
    group: int = 1
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    slots_first: bool = False
    max_blocks: int = 4096
    window: int = 0
    chunked: bool = False
    sinks: bool = False


def random_trees(
    rows: tuple[int, ...], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of the requests among a batch's rows, and each row's mask of its tree. Requests with
    an odd index have three more rows before their tree."""
    lengths = [max(count, 1) + 3 * (r % 2) for r, count in enumerate(rows)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    masks = torch.zeros(int(starts[-1]), dtype=torch.int64)
    for end, count in zip(starts[1:].tolist(), rows):
        masks[end - count : end] = random_masks(count, generator)
    return starts, masks


def tree_problem(shape: AttentionShape, device: torch.device | str, seed: int = 0) -> TreeBatch:
    """A batch of random trees. Requests with an odd index have three more rows before their tree.

    The query is a slice of a wider tensor, as a fused QKV projection makes it.
    """
    generator = torch.Generator().manual_seed(seed)
    starts, masks = random_trees(shape.rows, generator)
    roots = [length - rows for length, rows in zip(shape.lens, shape.rows)]
    cache = _cache(shape, device, generator, roots)
    # A request without rows has no prefix either, as in an engine.
    prefix_lens = [root if rows else 0 for root, rows in zip(roots, shape.rows)]
    return TreeBatch(
        **cache,
        chunked=shape.chunked,
        query=_query(shape, len(masks), device, generator),
        query_start_loc=starts.to(device, torch.int32),
        seq_lens=torch.tensor(shape.lens, dtype=torch.int32, device=device),
        prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32, device=device),
        row_masks=masks.to(device),
        row_depths=_depths(masks).to(device),
        num_rows=torch.tensor(shape.rows, dtype=torch.int32, device=device),
        max_rows=max(shape.rows),
        max_seq_len=cache["block_table"].shape[1] * shape.block_size,
        scale=shape.head_size**-0.5,
    )


def _depths(masks: torch.Tensor) -> torch.Tensor:
    """i32 ``[rows]``: how many ancestors each row has."""
    bits = masks[:, None] >> torch.arange(64) & 1
    return (bits.sum(1) - 1).clamp(min=0).to(torch.int32)


def _query(
    shape: AttentionShape, rows: int, device: torch.device | str, generator: torch.Generator
) -> torch.Tensor:
    heads = shape.kv_heads * shape.group
    wide = torch.randn(rows, heads + 2 * shape.kv_heads, shape.head_size, generator=generator)
    return wide.to(device, shape.dtype)[:, :heads]


def _cache(
    shape: AttentionShape,
    device: torch.device | str,
    generator: torch.Generator,
    positions: list[int],
) -> dict[str, Any]:
    """The cache; `positions` has the least position of a row of each request."""
    blocks = cdiv(max(*shape.lens, 1), shape.block_size)
    needed = len(shape.lens) * blocks
    pool = min(needed, shape.max_blocks)
    table = torch.randperm(needed, generator=generator) % pool
    dims = [pool, shape.kv_heads, shape.block_size, 2 * shape.head_size]
    if shape.slots_first:
        dims[1], dims[2] = dims[2], dims[1]
    dtype = torch.float8_e4m3fn if shape.fp8 else shape.dtype
    # The values are drawn on the device that reads them: a cache of a long context is large.
    local = torch.Generator(device).manual_seed(
        int(torch.randint(0, 1 << 30, (1,), generator=generator))
    )
    cache = torch.randn(dims, generator=local, device=device).to(dtype)
    table = table.view(len(shape.lens), blocks)
    if shape.window:
        # One more block for all that no row sees.
        cache = torch.cat([cache, torch.full_like(cache[:1], float("nan"))])
        for row, position in zip(table, positions):
            first = first_key(position, shape.window, chunked=shape.chunked)
            row[: first // shape.block_size] = pool
    heads = shape.kv_heads * shape.group
    sinks = torch.randn(heads, generator=generator).to(device, shape.dtype) if shape.sinks else None
    return {
        "window": shape.window,
        "sinks": sinks,
        "kv_cache": cache.transpose(1, 2) if shape.slots_first else cache,
        "block_table": table.to(device, torch.int32),
        "k_scale": torch.tensor(0.7, device=device) if shape.fp8 else None,
        "v_scale": torch.tensor([1.3], device=device) if shape.fp8 else None,
    }


def draft_problem(
    shape: AttentionShape,
    topk: int,
    steps: int,
    level: int,
    device: torch.device | str,
    seed: int = 0,
) -> DraftBatch:
    """A random frontier of a draft; ``shape.rows`` is unused."""
    generator = torch.Generator().manual_seed(seed)
    num_reqs = len(shape.lens)
    ancestors = torch.randint(0, topk, (num_reqs, topk, steps), generator=generator)
    ancestors[:, :, level] = torch.arange(topk)
    ancestors += torch.arange(steps) * topk
    scratch = torch.randn(
        num_reqs + 1, steps * topk, shape.kv_heads, 2 * shape.head_size, generator=generator
    )
    firsts = [length + level for length in shape.lens]
    return DraftBatch(
        **_cache(shape, device, generator, firsts),
        query=_query(shape, num_reqs * topk, device, generator),
        scratch_kv=scratch.to(device, shape.dtype),
        ancestors=ancestors.to(device, torch.int32),
        level=level,
        prefix_lens=torch.tensor(shape.lens, dtype=torch.int32, device=device),
        scale=shape.head_size**-0.5,
        num_reqs=num_reqs,
        topk=topk,
    )


def untouched(query: torch.Tensor) -> torch.Tensor:
    """An output for a query: contiguous, of its shape and dtype, full of `UNTOUCHED`."""
    return torch.full_like(query, UNTOUCHED, memory_format=torch.contiguous_format)
