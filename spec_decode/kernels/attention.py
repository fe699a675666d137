"""Attention of tree rows: paged keys, an ancestor mask a row, split over the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from vllm_graft.spec_decode.kernels.attention_kernel import combine_kernel, split_kernel
from vllm_graft.spec_decode.kernels.scratch import write_scratch

__all__ = ["AttentionWorkspace", "draft_attention", "tree_attention", "write_scratch"]

_FP8 = (torch.uint8, torch.float8_e4m3fn)
_MAX_TILE = 128
# A split of fewer keys costs more in the combine step than it gains.
_MIN_SPLIT_KEYS = 128


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results of the splits, at addresses that graphs may hold.

    Flat, so that layers of other sizes (target and draft) share it. A pair of request and split
    takes ``rows * num_heads * (head_size + 2) * 4`` bytes. The number of splits falls as that of
    requests rises, so there is room for as many pairs as give each of ``4 * multiprocessors``
    programs a tile of 128 rows (about 35 MB on an H200 at head size 128), for at least
    ``max_splits`` pairs, and for at most ``max_reqs * max_splits``.

    Attributes:
        acc: f32 ``[pairs * max_rows * num_heads * head_size]``, not yet normalised.
        peak: f32 ``[pairs * max_rows * num_heads]``, largest logit in units of log 2.
        total: f32 ``[pairs * max_rows * num_heads]``, sum of weights.
        max_splits: Most splits of a request.
        multiprocessors: Of the device.
    """

    acc: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    max_splits: int
    multiprocessors: int

    @classmethod
    def allocate(
        cls,
        max_reqs: int,
        max_rows: int,
        num_heads: int,
        head_size: int,
        max_splits: int,
        device: torch.device | str,
    ) -> AttentionWorkspace:
        """Space for calls of at most ``max_reqs`` requests of ``max_rows`` rows each."""
        device = torch.device(device)
        multiprocessors = _multiprocessors(device)
        pairs = 4 * multiprocessors * _MAX_TILE // (max_rows * num_heads)
        pairs = min(max(pairs, max_splits), max_reqs * max_splits)
        places = pairs * max_rows * num_heads
        return cls(
            acc=torch.empty(places * head_size, dtype=torch.float32, device=device),
            peak=torch.empty(places, dtype=torch.float32, device=device),
            total=torch.empty(places, dtype=torch.float32, device=device),
            max_splits=max_splits,
            multiprocessors=multiprocessors,
        )

    def num_pairs(self, rows: int, num_heads: int, head_size: int) -> int:
        """Pairs of request and split that fit, for a layer of these sizes."""
        places = rows * num_heads
        return int(min(self.peak.numel() // places, self.acc.numel() // (places * head_size)))

    def num_splits(self, num_reqs: int, tiles: int, max_seq_len: int, num_pairs: int) -> int:
        """Splits for a launch of ``tiles`` programs a request and split.

        Depends on host values only, so that a captured grid stays right.
        """
        programs = num_reqs * tiles
        # Two programs a multiprocessor hide each other's waits; where one each is there without
        # splits, the combine step would cost more than that gains.
        wanted = 2 * self.multiprocessors // programs
        if 4 * programs > 3 * self.multiprocessors:
            wanted = 1
        useful = int(triton.cdiv(max_seq_len, _MIN_SPLIT_KEYS))
        return max(1, min(wanted, useful, self.max_splits, num_pairs // num_reqs))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # The interpreter: any number that makes splits happen.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int

    @classmethod
    def choose(cls, rows: int, head_pad: int, dtype: torch.dtype) -> Tile:
        """Rows and keys of a program, so that its accumulator and two K/V tiles fit a block."""
        rows = max(16, triton.next_power_of_2(rows))
        if dtype == torch.float32:
            # Exact float32 has no tensor cores: small tiles, or registers spill.
            return cls(min(rows, 32 if head_pad <= 128 else 16), 32, 4, 1)
        rows = min(rows, _MAX_TILE * 128 // max(head_pad, 128))
        keys = 64 if head_pad <= 128 else 32
        return cls(rows, keys, 8 if rows * head_pad > 64 * 128 else 4, 2)


class _Mode(NamedTuple):
    """What differs between verifying a tree and drafting a level of one."""

    num_reqs: int
    max_rows: int
    kv_lens: torch.Tensor
    query_start_loc: torch.Tensor | None = None
    row_masks: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
    scratch_kv: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    level: int = 0

    @property
    def draft(self) -> bool:
        return self.ancestors is not None


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    row_masks: torch.Tensor,
    num_rows: torch.Tensor,
    max_rows: int,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    max_seq_len: int | None = None,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of the last ``num_rows[r]`` rows of each request's query.

    All of a request's keys before those of these rows are visible; of the rows' own keys, which
    are the last of the sequence, those whose bit is set in the row's mask. Reads no device value
    on the host, so it can be captured; every shape-like argument is then a bound.

    Args:
        query: ``[num_tokens, num_heads, head_size]``, bf16, fp16 or fp32.
        kv_cache: ``[num_blocks, kv_heads, block_size, 2 * head_size]``, K before V, last dimension
            contiguous; dtype of ``query``, or e4m3 (float8_e4m3fn or uint8).
        out: As ``query``; rows that are not computed stay untouched.
        query_start_loc: i32 ``[>= num_reqs + 1]``.
        seq_lens: i32 ``[num_reqs]``, keys of a request, those of the query included.
        block_table: i32 ``[>= num_reqs, max_blocks]``.
        row_masks: i64 ``[num_tokens]``.
        num_rows: i32 ``[>= num_reqs]``, at most ``max_rows`` and the query's are computed.
        max_rows: Bound of ``num_rows``, at most 64.
        scale: Of the logits.
        k_scale: f32, one element; multiplies K of an e4m3 cache. None means 1.
        v_scale: As ``k_scale``, for V.
        soft_cap: ``cap * tanh(logits / cap)`` if positive.
        max_seq_len: Bound of ``seq_lens``, for the number of splits; None: from ``block_table``.
        workspace: None means one split.
        num_splits: Forces the number of splits.
    """
    if not 1 <= max_rows <= 64:
        raise ValueError(f"max_rows must be 1 to 64 (int64 masks), got {max_rows}")
    mode = _Mode(
        num_reqs=seq_lens.shape[0],
        max_rows=max_rows,
        kv_lens=seq_lens,
        query_start_loc=query_start_loc,
        row_masks=row_masks,
        num_rows=num_rows,
    )
    scales = (scale, k_scale, v_scale, soft_cap)
    _launch(query, kv_cache, out, block_table, mode, scales, max_seq_len, workspace, num_splits)


def draft_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    scratch_kv: torch.Tensor,
    ancestors: torch.Tensor,
    level: int,
    out: torch.Tensor,
    *,
    prefix_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    max_seq_len: int | None = None,
    num_reqs: int,
    topk: int,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of a level's frontier in the draft: the paged prefix and each node's ancestors.

    Args:
        query: ``[num_reqs * topk, num_heads, head_size]``.
        kv_cache: As in :func:`tree_attention`, of the draft's layer.
        scratch_kv: ``[max_reqs, steps * topk, kv_heads, 2 * head_size]``, dtype of ``query``; by
            batch row, see :func:`write_scratch`.
        ancestors: i32 ``[max_reqs, topk, steps]``, ``CandidateTable.ancestors``.
        level: Level of the frontier, whose own K/V is in the scratch already.
        out: As ``query``.
        prefix_lens: i32 ``[>= num_reqs]``, paged keys of each request, all visible.
        block_table: i32 ``[>= num_reqs, max_blocks]``.
        scale: Of the logits.
        k_scale: As in :func:`tree_attention`; never applied to the scratch.
        v_scale: As ``k_scale``.
        soft_cap: As in :func:`tree_attention`.
        max_seq_len: Bound of ``prefix_lens``.
        num_reqs: Batch rows.
        topk: Frontier nodes a batch row.
        workspace: As in :func:`tree_attention`.
        num_splits: Forces the number of splits.
    """
    mode = _Mode(
        num_reqs=num_reqs,
        max_rows=topk,
        kv_lens=prefix_lens,
        scratch_kv=scratch_kv,
        ancestors=ancestors,
        level=level,
    )
    scales = (scale, k_scale, v_scale, soft_cap)
    _launch(query, kv_cache, out, block_table, mode, scales, max_seq_len, workspace, num_splits)


def _launch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    mode: _Mode,
    scales: tuple[float, torch.Tensor | None, torch.Tensor | None, float],
    max_seq_len: int | None,
    workspace: AttentionWorkspace | None,
    num_splits: int | None,
) -> None:
    if mode.num_reqs == 0:
        return
    _check(query, kv_cache, out, mode)
    num_heads, head_size = query.shape[1:]
    kv_heads, block_size = kv_cache.shape[1:3]
    group = num_heads // kv_heads
    head_pad = max(16, triton.next_power_of_2(head_size))
    tile = Tile.choose(mode.max_rows * group, head_pad, query.dtype)
    tiles = triton.cdiv(mode.max_rows * group, tile.rows)
    pairs = workspace.num_pairs(mode.max_rows, num_heads, head_size) if workspace else 0
    if num_splits is not None:
        splits = num_splits
    elif workspace is not None:
        bound = max_seq_len or block_table.shape[1] * block_size
        splits = workspace.num_splits(mode.num_reqs, tiles * kv_heads, bound, pairs)
    else:
        splits = 1
    if splits > 1 and mode.num_reqs * splits > pairs:
        raise ValueError(
            f"{mode.num_reqs} requests x {splits} splits of {mode.max_rows} rows, {num_heads} "
            f"heads of {head_size} do not fit a workspace with room for {pairs}"
        )
    acc = workspace.acc if workspace else None
    peak = workspace.peak if workspace else None
    total = workspace.total if workspace else None
    scale, k_scale, v_scale, soft_cap = scales
    fp8 = kv_cache.dtype in _FP8
    shared = {
        "HEADS": num_heads,
        "HEAD": head_size,
        "HEAD_PAD": head_pad,
        "PARTIAL_ROWS": mode.max_rows,
        "DRAFT": mode.draft,
        "TOPK": mode.max_rows if mode.draft else 1,
    }
    split_kernel[(mode.num_reqs * tiles, kv_heads, splits)](
        query,
        kv_cache.view(torch.uint8) if fp8 else kv_cache,
        out,
        acc,
        peak,
        total,
        mode.query_start_loc,
        mode.kv_lens,
        block_table,
        mode.row_masks,
        mode.num_rows,
        mode.scratch_kv,
        mode.ancestors,
        k_scale,
        v_scale,
        scale,
        soft_cap,
        mode.level,
        splits,
        *query.stride()[:2],
        *out.stride()[:2],
        *kv_cache.stride()[:3],
        block_table.stride(0),
        *(mode.scratch_kv.stride()[:3] if mode.scratch_kv is not None else (0, 0, 0)),
        **shared,
        GROUP=group,
        BLOCK_SIZE=block_size,
        TILES=tiles,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        STEPS=mode.ancestors.shape[2] if mode.ancestors is not None else 1,
        FP8=fp8,
        HAS_CAP=soft_cap > 0,
        SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        combine_kernel[(mode.num_reqs, mode.max_rows, num_heads)](
            out,
            acc,
            peak,
            total,
            mode.query_start_loc,
            mode.num_rows,
            splits,
            *out.stride()[:2],
            **shared,
            SPLITS_PAD=triton.next_power_of_2(splits),
            num_warps=4,
        )


def _check(query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, mode: _Mode) -> None:
    if kv_cache.shape[3] != 2 * query.shape[2] or query.shape[1] % kv_cache.shape[1]:
        raise ValueError(
            f"a query of {tuple(query.shape)} does not fit a KV cache of {tuple(kv_cache.shape)}"
        )
    if kv_cache.dtype not in (query.dtype, *_FP8):
        raise ValueError(
            f"the KV cache has dtype {kv_cache.dtype}, the query {query.dtype}: they must be equal "
            "unless the cache is e4m3"
        )
    scratch = mode.scratch_kv
    if scratch is not None and scratch.dtype != query.dtype:
        raise ValueError(f"the scratch has dtype {scratch.dtype}, the query {query.dtype}")
    for tensor in (query, kv_cache, out):
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides {tensor.stride()}")
