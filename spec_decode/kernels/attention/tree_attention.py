"""Attention of tree rows: paged keys, one ancestor mask per row, split over the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm_graft.spec_decode.kernels.attention.attention_kernel import combine_kernel, split_kernel
from vllm_graft.spec_decode.kernels.attention.scratch import write_scratch
from vllm_graft.spec_decode.kernels.attention.tile import MAX_TILE, Tile
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

__all__ = ["AttentionWorkspace", "draft_attention", "tree_attention", "write_scratch"]

_FP8 = (torch.uint8, torch.float8_e4m3fn)
# For batches whose requests mostly have far fewer rows than the bound: most of a larger tile would
# be empty, and programs without rows would hold a multiprocessor for themselves.
_MIXED_TILE = 32
# A split of fewer keys costs more in the combine step than it gains. A draft's rows are few, so its
# combine step costs less.
MIN_SPLIT_KEYS = 128
MIN_DRAFT_SPLIT_KEYS = 64
_SPLIT_BYTES = 256 << 20


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results of the splits, at addresses that graphs may hold.

    The tensors are flat, so that layers of different sizes (target and draft) share them. A pair of
    request and split takes ``rows * num_heads * (head_size + 2) * 4`` bytes. The number of splits
    falls as the number of requests rises, so there is room for as many pairs as give each of
    ``4 * multiprocessors`` programs a tile of 128 rows, for at least ``max_splits`` pairs, and for
    at most ``max_reqs * max_splits``. There are fewer splits where these pairs would take more than
    256 MiB, as with 128 heads that share their keys (MLA).

    Attributes:
        acc: f32 ``[pairs * max_rows * num_heads * head_size]``, not yet normalised.
        peak: f32 ``[pairs * max_rows * num_heads]``, largest logit in units of log 2.
        total: f32 ``[pairs * max_rows * num_heads]``, sum of weights.
        max_splits: Most splits of a request.
        multiprocessors: Multiprocessors of the device.
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
        pairs = 4 * multiprocessors * MAX_TILE // (max_rows * num_heads)
        pair_bytes = 4 * max_rows * num_heads * (head_size + 2)
        max_splits = max(1, min(max_splits, _SPLIT_BYTES // pair_bytes))
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

    def num_splits(
        self,
        num_reqs: int,
        tiles: int,
        max_seq_len: int,
        num_pairs: int,
        least: int = MIN_SPLIT_KEYS,
    ) -> int:
        """Splits for a launch of ``tiles`` programs per request and split.

        The number depends on host values only, so that a captured grid stays right.

        Args:
            num_reqs: Requests.
            tiles: Programs per request and split.
            max_seq_len: Upper bound of the keys of a request.
            num_pairs: Pairs of request and split that there is room for.
            least: Keys that a split should have.
        """
        programs = num_reqs * tiles
        # Two programs on a multiprocessor hide each other's waits. Where most multiprocessors have
        # one without splits already, the combine step would cost more than splits gain.
        wanted = 2 * self.multiprocessors // programs
        if 4 * programs > 3 * self.multiprocessors:
            wanted = 1
        useful = cdiv(max_seq_len, least)
        return max(1, min(wanted, useful, self.max_splits, num_pairs // num_reqs))


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # The interpreter: any number that makes splits happen.
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class _Call(NamedTuple):
    """What a launch reads: trees to verify, or one level of trees to draft."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    num_reqs: int
    max_rows: int
    kv_lens: torch.Tensor
    max_seq_len: int | None
    scale: float
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    soft_cap: float
    query_start_loc: torch.Tensor | None = None
    row_masks: torch.Tensor | None = None
    row_depths: torch.Tensor | None = None
    num_rows: torch.Tensor | None = None
    mixed: bool = False
    window: int = 0
    chunked: bool = False
    sinks: torch.Tensor | None = None
    scratch_kv: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    level: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return int(self.query.shape[1] // self.kv_cache.shape[1])

    @property
    def draft(self) -> bool:
        return self.ancestors is not None

    def parts(self, splits: int) -> int:
        """Programs per tile and KV head: one per split, and one more for a draft's scratch."""
        return splits + 1 if self.draft and splits > 1 else splits

    def shared(self) -> dict[str, Any]:
        """The constants that both kernels take."""
        draft = self.draft
        num_heads, head_size = self.query.shape[1:]
        return {
            "HEADS": num_heads,
            "HEAD": head_size,
            "HEAD_PAD": max(16, next_power_of_2(head_size)),
            "PARTIAL_ROWS": self.max_rows,
            "DRAFT": draft,
            "TOPK": self.max_rows if draft else 1,
        }

    def check(self, out: torch.Tensor) -> None:
        query, kv_cache = self.query, self.kv_cache
        if kv_cache.shape[3] != 2 * query.shape[2] or query.shape[1] % kv_cache.shape[1]:
            raise ValueError(
                f"a query of {tuple(query.shape)} does not fit a KV cache of "
                f"{tuple(kv_cache.shape)}"
            )
        if kv_cache.dtype not in (query.dtype, *_FP8):
            raise ValueError(
                f"the KV cache has dtype {kv_cache.dtype}, the query {query.dtype}: they must be "
                "equal unless the cache is e4m3"
            )
        scratch = self.scratch_kv
        if scratch is not None and scratch.dtype != query.dtype:
            raise ValueError(f"the scratch has dtype {scratch.dtype}, the query {query.dtype}")
        if self.window and not self.draft and self.row_depths is None:
            raise ValueError(f"a window of {self.window} keys needs the depths of rows")
        for tensor in (query, kv_cache, out):
            if tensor.stride(-1) != 1:
                raise ValueError(
                    f"the last dimension must be contiguous, strides {tensor.stride()}"
                )


def tree_attention(
    batch: TreeBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of the last ``num_rows[r]`` rows of each request's query.

    No device value is read on the host, so the call can be captured. All sizes in a captured graph
    are upper bounds.

    Args:
        batch: A batch whose query is not e4m3.
        out: Like the query; rows that are not computed stay untouched.
        workspace: Receives partial results; None means one split.
        num_splits: Forces the number of splits.

    Raises:
        ValueError: if shapes, dtypes or strides don't match, or the splits don't fit the workspace.
    """
    if not 1 <= batch.max_rows <= 64:
        raise ValueError(f"max_rows must be 1 to 64 (int64 masks), got {batch.max_rows}")
    call = _Call(
        query=batch.query,
        kv_cache=batch.kv_cache,
        block_table=batch.block_table,
        num_reqs=batch.num_reqs,
        max_rows=batch.max_rows,
        kv_lens=batch.seq_lens,
        max_seq_len=batch.max_seq_len,
        scale=batch.scale,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        soft_cap=batch.soft_cap,
        query_start_loc=batch.query_start_loc,
        row_masks=batch.row_masks,
        row_depths=batch.row_depths,
        num_rows=batch.num_rows,
        mixed=batch.mixed,
        window=batch.window,
        chunked=batch.chunked,
        sinks=batch.sinks,
    )
    _launch(call, out, workspace, num_splits)


def draft_attention(
    batch: DraftBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
) -> None:
    """Attention of a level's frontier in the draft.

    Args:
        batch: A batch whose scratch holds the level's own K/V; see :func:`write_scratch`.
        out: Like the query.
        workspace: As in :func:`tree_attention`.
        num_splits: Forces the number of splits.

    Raises:
        ValueError: As in :func:`tree_attention`.
    """
    call = _Call(
        query=batch.query,
        kv_cache=batch.kv_cache,
        block_table=batch.block_table,
        num_reqs=batch.num_reqs,
        max_rows=batch.topk,
        kv_lens=batch.prefix_lens,
        max_seq_len=batch.max_seq_len,
        scale=batch.scale,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        soft_cap=batch.soft_cap,
        window=batch.window,
        sinks=batch.sinks,
        scratch_kv=batch.scratch_kv,
        ancestors=batch.ancestors,
        level=batch.level,
    )
    _launch(call, out, workspace, num_splits)


def _launch(
    call: _Call,
    out: torch.Tensor,
    workspace: AttentionWorkspace | None,
    num_splits: int | None,
) -> None:
    if call.num_reqs == 0:
        return
    call.check(out)
    shared = call.shared()
    multiprocessors = workspace.multiprocessors if workspace else 0
    crowded = call.num_reqs * call.kv_cache.shape[1] > multiprocessors
    rows = call.max_rows * call.group
    most = min(rows, _MIXED_TILE if call.mixed else MAX_TILE)
    sizes = (most, shared["HEAD_PAD"], call.query.dtype)
    tiles = cdiv(rows, Tile.choose(*sizes, crowded=crowded, split=True).rows)
    splits = _num_splits(call, tiles, workspace, num_splits)
    tile = Tile.choose(*sizes, crowded=crowded, split=splits > 1)
    partial = (workspace.acc, workspace.peak, workspace.total) if workspace else (None,) * 3
    _launch_splits(call, out, partial, shared, tile, tiles, splits)
    if splits > 1:
        parts = call.parts(splits)
        combine_kernel[(call.num_reqs, call.max_rows, shared["HEADS"])](
            out,
            *partial,
            call.query_start_loc,
            call.num_rows,
            parts,
            *out.stride()[:2],
            **shared,
            SPLITS_PAD=next_power_of_2(parts),
            num_warps=4,
        )


def _num_splits(
    call: _Call, tiles: int, workspace: AttentionWorkspace | None, forced: int | None
) -> int:
    """Splits of each request's keys, for ``tiles`` programs per KV head and split."""
    num_heads, head_size = call.query.shape[1:]
    pairs = workspace.num_pairs(call.max_rows, num_heads, head_size) if workspace else 0
    if forced is not None:
        splits = forced
    elif workspace is not None:
        kv_heads, block_size = call.kv_cache.shape[1:3]
        bound = call.max_seq_len or call.block_table.shape[1] * block_size
        if call.window:
            bound = min(bound, call.window + call.max_rows)
        room = pairs - call.num_reqs if call.draft else pairs
        least = MIN_DRAFT_SPLIT_KEYS if call.draft else MIN_SPLIT_KEYS
        splits = workspace.num_splits(call.num_reqs, tiles * kv_heads, bound, room, least)
    else:
        splits = 1
    if splits > 1 and call.num_reqs * call.parts(splits) > pairs:
        raise ValueError(
            f"{call.num_reqs} requests x {splits} splits of {call.max_rows} rows, {num_heads} "
            f"heads of {head_size} do not fit a workspace with room for {pairs}"
        )
    return splits


def _launch_splits(
    call: _Call,
    out: torch.Tensor,
    partial: tuple[torch.Tensor | None, ...],
    shared: dict[str, Any],
    tile: Tile,
    tiles: int,
    splits: int,
) -> None:
    query, kv_cache, scratch = call.query, call.kv_cache, call.scratch_kv
    kv_heads, block_size = kv_cache.shape[1:3]
    fp8 = kv_cache.dtype in _FP8
    split_kernel[(call.num_reqs * tiles, kv_heads, call.parts(splits))](
        query,
        kv_cache.view(torch.uint8) if fp8 else kv_cache,
        out,
        *partial,
        call.query_start_loc,
        call.kv_lens,
        call.block_table,
        call.row_masks,
        call.row_depths,
        call.num_rows,
        scratch,
        call.ancestors,
        call.sinks,
        call.k_scale,
        call.v_scale,
        call.scale,
        call.soft_cap,
        call.level,
        splits,
        *query.stride()[:2],
        *out.stride()[:2],
        *kv_cache.stride()[:3],
        call.block_table.stride(0),
        *(scratch.stride()[:3] if scratch is not None else (0, 0, 0)),
        # Trees of all depths share the compiled kernel.
        call.ancestors.stride(1) if call.ancestors is not None else 0,
        **shared,
        GROUP=call.group,
        BLOCK_SIZE=block_size,
        TILES=tiles,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        FP8=fp8,
        HAS_CAP=call.soft_cap > 0,
        WINDOW=call.window,
        CHUNKED=call.chunked,
        SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
