"""Attention of tree rows over paged latents (MLA), split over the keys."""

from __future__ import annotations

import functools
from typing import Any

import torch

from vllm_graft.spec_decode.kernels.attention.attention_kernel import combine_kernel
from vllm_graft.spec_decode.kernels.attention.latent_kernel import copy_rows_kernel, latent_kernel
from vllm_graft.spec_decode.kernels.attention.tile import Tile
from vllm_graft.spec_decode.kernels.attention.tree_attention import AttentionWorkspace
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.trees.batch import LatentBatch

_FP8 = (torch.uint8, torch.float8_e4m3fn)
_COPIED = 1024
"""Elements of a row that a program copies."""


@functools.cache
def latent_tile(rows: int, rank_pad: int, dtype: torch.dtype, *, mixed: bool) -> Tile:
    """Rows and keys of a program, so that its accumulator fits its registers.

    Args:
        rows: Query rows of a request, times heads.
        rank_pad: Elements of a latent, padded.
        dtype: Dtype of the query.
        mixed: Whether most requests have far fewer rows, so that most of a large tile were empty.
    """
    rows = max(16, next_power_of_2(rows))
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1)
    rows = min(rows, 32 if mixed else 64)
    return Tile(rows, 32, 8 if rows * rank_pad > 32 * 512 else 4, 2)


def latent_attention(
    batch: LatentBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of the last ``num_rows[r]`` rows of each request's query, as weighted latents.

    No device value is read on the host, so the call can be captured. All sizes in a captured graph
    are upper bounds.

    Args:
        batch: A batch.
        out: ``[num_tokens, num_heads, rank]``, dtype of the query; rows that are not computed stay
            untouched.
        workspace: Receives partial results; None means one split.
        num_splits: Forces the number of splits.

    Raises:
        ValueError: if shapes, dtypes or strides don't match, or the splits don't fit the workspace.
    """
    _check(batch, out)
    if batch.num_reqs == 0:
        return
    query, latents = batch.query, batch.latents
    num_heads, rank = query.shape[1:]
    rope = batch.query_rope.shape[2]
    rank_pad = max(16, next_power_of_2(rank))
    rows = batch.max_rows * num_heads
    tile = latent_tile(rows, rank_pad, query.dtype, mixed=batch.mixed)
    tiles = cdiv(rows, tile.rows)
    splits = _num_splits(batch, tiles, workspace, num_splits)
    partial = (workspace.acc, workspace.peak, workspace.total) if workspace else (None,) * 3
    fp8 = latents.dtype in _FP8
    sizes: dict[str, Any] = {"HEADS": num_heads, "PARTIAL_ROWS": batch.max_rows}
    latent_kernel[(batch.num_reqs * tiles, splits)](
        query,
        batch.query_rope,
        latents.view(torch.uint8) if fp8 else latents,
        out,
        *partial,
        batch.query_start_loc,
        batch.prefix_lens,
        batch.block_table,
        batch.row_masks,
        batch.num_rows,
        batch.k_scale,
        batch.scale,
        splits,
        *query.stride()[:2],
        *batch.query_rope.stride()[:2],
        *out.stride()[:2],
        *latents.stride()[:2],
        batch.block_table.stride(0),
        **sizes,
        RANK=rank,
        RANK_PAD=rank_pad,
        ROPE=rope,
        ROPE_PAD=max(16, next_power_of_2(rope)),
        BLOCK_SIZE=latents.shape[1],
        TILES=tiles,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        FP8=fp8,
        SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        combine_kernel[(batch.num_reqs, batch.max_rows, num_heads)](
            out,
            *partial,
            batch.query_start_loc,
            batch.num_rows,
            splits,
            *out.stride()[:2],
            **sizes,
            HEAD=rank,
            HEAD_PAD=rank_pad,
            SPLITS_PAD=next_power_of_2(splits),
            DRAFT=False,
            TOPK=1,
            # All splits of a row are held at once.
            num_warps=8 if rank_pad > 256 else 4,
        )


def copy_tree_rows(source: torch.Tensor, target: torch.Tensor, batch: LatentBatch) -> None:
    """Copy the rows of trees from one tensor to another, ``[>= num_tokens, width]`` each.

    Other rows of the target stay untouched. No device value is read on the host.

    Args:
        source: rows of the batch.
        target: likewise, of the same width and dtype.
        batch: says which rows belong to trees.
    """
    width = source.shape[1]
    copy_rows_kernel[(batch.num_reqs, batch.max_rows, cdiv(width, _COPIED))](
        source,
        target,
        batch.query_start_loc,
        batch.num_rows,
        source.stride(0),
        target.stride(0),
        WIDTH=width,
        MAX_ROWS=batch.max_rows,
        BLOCK=_COPIED,
        num_warps=4,
    )


def _num_splits(
    batch: LatentBatch, tiles: int, workspace: AttentionWorkspace | None, forced: int | None
) -> int:
    num_heads, rank = batch.query.shape[1:]
    pairs = workspace.num_pairs(batch.max_rows, num_heads, rank) if workspace else 0
    if forced is not None:
        splits = forced
    elif workspace is not None:
        splits = workspace.num_splits(batch.num_reqs, tiles, batch.max_seq_len, pairs)
    else:
        splits = 1
    if splits > 1 and batch.num_reqs * splits > pairs:
        raise ValueError(
            f"{batch.num_reqs} requests x {splits} splits of {batch.max_rows} rows, {num_heads} "
            f"heads of {rank} do not fit a workspace with room for {pairs}"
        )
    return splits


def _check(batch: LatentBatch, out: torch.Tensor) -> None:
    query, rope, latents = batch.query, batch.query_rope, batch.latents
    if not 1 <= batch.max_rows <= 64:
        raise ValueError(f"max_rows must be 1 to 64 (int64 masks), got {batch.max_rows}")
    width = query.shape[2] + rope.shape[2]
    if latents.dim() != 3 or latents.shape[2] != width or rope.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"queries of {tuple(query.shape)} and {tuple(rope.shape)} do not fit latents of "
            f"{tuple(latents.shape)}"
        )
    if out.shape != query.shape:
        raise ValueError(f"the output is {tuple(out.shape)}, the query {tuple(query.shape)}")
    if rope.dtype != query.dtype or latents.dtype not in (query.dtype, *_FP8):
        raise ValueError(
            f"the latents have dtype {latents.dtype}, the queries {query.dtype} and {rope.dtype}: "
            "they must be equal unless the latents are e4m3"
        )
    for tensor in (query, rope, latents, out):
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides {tensor.stride()}")
