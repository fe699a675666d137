"""Attention of tree and draft rows over latents (MLA), split over the paged ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm_graft.spec_decode.kernels.attention.attention_call import (
    AttentionCall,
    AttentionWorkspace,
    check_last_strides,
    check_masked_rows,
    partial_results,
)
from vllm_graft.spec_decode.kernels.attention.attention_plan import Tile
from vllm_graft.spec_decode.kernels.attention.e4m3 import FP8, conversion
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.latent.latent_kernel import copy_rows_kernel, latent_kernel
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch

_COPIED = 1024
"""Elements of a row that a program copies."""


@functools.cache
def latent_tile(
    rows: int, rank_pad: int, dtype: torch.dtype, *, mixed: bool, two_dtypes: bool = False
) -> Tile:
    """Rows and keys of a program, so that its accumulator fits its registers.

    Args:
        rows: query rows of a request, times heads.
        rank_pad: elements of a latent, padded.
        mixed: whether most requests have far fewer rows, so that most of a large tile were empty.
        two_dtypes: whether cached latents are in FP8 and those of a draft's levels in 16 bits.
            Their tiles do not share memory, which for 64 rows sm_80 has too little of.
    """
    rows = max(16, next_power_of_2(rows))
    if dtype == torch.float32:
        return Tile(16, 16, 4, 1)
    rows = min(rows, 32 if mixed or two_dtypes else 64)
    return Tile(rows, 32, 8 if rows * rank_pad > 32 * 512 else 4, 2)


def check_latent_shapes(
    query: torch.Tensor, rope: torch.Tensor, latents: torch.Tensor, out: torch.Tensor
) -> None:
    """Raise a `ValueError` if queries, latents and outputs don't fit."""
    width = query.shape[2] + rope.shape[2]
    if latents.dim() != 3 or latents.shape[2] != width or rope.shape[:2] != query.shape[:2]:
        raise ValueError(
            f"queries of {tuple(query.shape)} and {tuple(rope.shape)} do not fit latents of "
            f"{tuple(latents.shape)}"
        )
    if out.shape != query.shape:
        raise ValueError(f"the output is {tuple(out.shape)}, the query {tuple(query.shape)}")


@dataclass(kw_only=True, slots=True)
class _Call(AttentionCall):
    query_rope: torch.Tensor
    latents: torch.Tensor
    prefix_lens: torch.Tensor
    max_seq_len: int

    def most_keys(self) -> int:
        return self.max_seq_len

    def check(self, out: torch.Tensor) -> None:
        query, rope, latents = self.query, self.query_rope, self.latents
        width = query.shape[2] + rope.shape[2]
        check_latent_shapes(query, rope, latents, out)
        if rope.dtype != query.dtype or latents.dtype not in (query.dtype, *FP8):
            raise ValueError(
                f"the latents have dtype {latents.dtype}, the queries {query.dtype} and "
                f"{rope.dtype}: they must be equal unless the latents are e4m3"
            )
        scratch = self.scratch
        if scratch is not None and (scratch.dtype, scratch.shape[2:]) != (query.dtype, (1, width)):
            raise ValueError(
                f"the scratch is {tuple(scratch.shape)} of {scratch.dtype}, and the rows of "
                f"queries have {width} numbers of {query.dtype}"
            )
        check_last_strides(query, rope, latents, out)


def latent_attention(
    batch: LatentBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of the last ``num_rows[r]`` rows of each request's query, as weighted latents.

    The host reads no device value, so the call can be captured; sizes in a graph are upper bounds.

    Args:
        out: ``[num_tokens, num_heads, rank]``, dtype of the query; rows that are not computed stay
            untouched.
        workspace: receives partial results; None means one split, unless `num_splits` forces more.

    Raises:
        ValueError: if shapes, dtypes or strides don't match, or the splits don't fit the workspace.
    """
    check_masked_rows(batch.max_rows)
    _launch(_Call.of(batch), out, workspace, num_splits)


def latent_draft_attention(
    batch: LatentDraftBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of a level's frontier in a draft with MLA; the rest is as of `latent_attention`.

    The scratch of `batch` holds the level's own latents; see ``write_scratch``.
    """
    _launch(_Call.of(batch, max_rows=batch.topk), out, workspace, num_splits)


def _launch(
    call: _Call, out: torch.Tensor, workspace: AttentionWorkspace | None, num_splits: int | None
) -> None:
    call.check(out)
    if call.num_reqs == 0:
        return
    query, latents, scratch = call.query, call.latents, call.scratch
    num_heads, rank = query.shape[1:]
    rope = call.query_rope.shape[2]
    rank_pad = call.head_pad
    rows = call.max_rows * num_heads
    fp8 = conversion(latents, query.dtype)
    two_dtypes = fp8 > 0 and scratch is not None
    tile = latent_tile(rows, rank_pad, query.dtype, mixed=call.mixed, two_dtypes=two_dtypes)
    tiles = cdiv(rows, tile.rows)
    splits = call.num_splits(tiles, workspace, num_splits)
    latent_kernel[(call.num_reqs * tiles, call.parts(splits))](
        query,
        call.query_rope,
        latents.view(torch.uint8) if fp8 else latents,
        out,
        *partial_results(workspace),
        call.query_start_loc,
        call.prefix_lens,
        call.block_table,
        call.row_masks,
        call.num_rows,
        scratch,
        call.ancestors,
        call.k_scale,
        call.scale,
        call.level,
        splits,
        *query.stride()[:2],
        *call.query_rope.stride()[:2],
        *out.stride()[:2],
        *latents.stride()[:2],
        call.block_table.stride(0),
        *(scratch.stride()[:2] if scratch is not None else (0, 0)),
        # Trees of all depths share the compiled kernel.
        call.ancestors.stride(1) if call.ancestors is not None else 0,
        **call.shared(),
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
    # All splits of a row are held at once.
    call.combine(out, workspace, splits, warps=8 if rank_pad > 256 else 4)


def copy_tree_rows(source: torch.Tensor, target: torch.Tensor, batch: LatentBatch) -> None:
    """Copy the rows of a batch's trees between tensors ``[>= num_tokens, width]`` of one dtype.

    Other rows of the target stay untouched. The host reads no device value.
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
