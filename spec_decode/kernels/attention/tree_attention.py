"""Attention of tree rows: paged keys, one ancestor mask per row, split over the keys."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.attention.attention_kernel import combine_kernel, split_kernel
from vllm_graft.spec_decode.kernels.attention.attention_plan import (
    MIN_DRAFT_SPLIT_KEYS,
    MIN_SPLIT_KEYS,
    AttentionWorkspace,
    Plan,
    Sizes,
    choose_plan,
    split_count,
)
from vllm_graft.spec_decode.kernels.attention.e4m3 import (
    FP8,
    PRODUCTS,
    conversion,
    native,
    refuse_without_hardware,
)
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, check_rows, next_power_of_2
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch


class UsedSplits(NamedTuple):
    """What tells the combining kernel which splits have keys. `kv_lens`, i32 ``[>= num_reqs]``, are
    each request's paged keys. Splits have whole tiles of `keys`. A `window` of 0 is none."""

    kv_lens: torch.Tensor
    keys: int
    window: int
    chunked: bool


class AttentionCall(ABC):
    """What a launch reads: trees to verify, or one level of trees to draft. Attributes are those of
    its batch (`trees/batch.py`), and what is given as its `own`; a draft's `max_rows` is its
    ``topk``. What only one kind of batches has is None or 0 here."""

    query_start_loc: Any = None
    row_masks: Any = None
    row_depths: Any = None
    num_rows: Any = None
    mixed = chunked = False
    scratch: Any = None
    ancestors: Any = None
    level = 0

    def __init__(self, batch: Any, **own: Any) -> None:
        self.__dict__.update(vars(batch), num_reqs=batch.num_reqs, **own)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @abstractmethod
    def most_keys(self) -> int:
        """Upper bound of the paged keys that a request's rows read."""

    @property
    def draft(self) -> bool:
        return self.ancestors is not None

    @property
    def head_pad(self) -> int:
        return max(16, next_power_of_2(self.query.shape[2]))

    def parts(self, splits: int) -> int:
        """Programs per tile: one per split, and one more for a draft's scratch."""
        return splits + 1 if self.draft and splits > 1 else splits

    def shared(self) -> dict[str, Any]:
        return {
            "HEADS": self.query.shape[1],
            "PARTIAL_ROWS": self.max_rows,
            "DRAFT": self.draft,
            "TOPK": self.max_rows if self.draft else 1,
        }

    def room(self, workspace: AttentionWorkspace) -> int:
        pairs: int = workspace.num_pairs(self.max_rows, *self.query.shape[1:])
        free = pairs - self.num_reqs if self.draft else pairs
        return min(workspace.max_splits, int(free // self.num_reqs))

    def num_splits(
        self, programs: int, workspace: AttentionWorkspace | None, forced: int | None
    ) -> int:
        """Splits of each request's paged keys, for so many programs per request and split. The
        number depends on host values only, so that a captured grid stays right."""
        if forced is not None:
            return forced
        if workspace is None:
            return 1
        return split_count(
            self.num_reqs * programs,
            workspace.multiprocessors,
            self.most_keys(),
            self.room(workspace),
            MIN_DRAFT_SPLIT_KEYS if self.draft else MIN_SPLIT_KEYS,
        )

    def combine(
        self, out: torch.Tensor, workspace: AttentionWorkspace | None, splits: int, warps: int = 4,
        *, width: int = 0, overlapped: bool = False, used: UsedSplits | None = None,
    ) -> None:  # fmt: skip
        """Make the output of what the splits have left in the workspace, if there are several.
        Options are those of a `Plan`. `used` tells the splits without keys, which have written
        nothing; None if all have written."""
        if splits == 1:
            return
        parts = self.parts(splits)
        heads, size = self.query.shape[1:]
        width = min(width or self.head_pad, self.head_pad)
        combine_kernel[(self.num_reqs, self.max_rows, heads * cdiv(size, width))](
            out, *partial_results(workspace), self.query_start_loc, self.num_rows,
            used.kv_lens if used else None, parts, self.level, *out.stride()[:2],
            **self.shared(), HEAD=size, WIDTH=width, PARTS_PAD=next_power_of_2(parts),
            BLOCK_N=used.keys if used else 1, WINDOW=used.window if used else 0,
            CHUNKED=used.chunked if used else False, OVERLAPPED=overlapped, num_warps=warps,
            # Other devices than NVIDIA's don't know the option.
            **({"launch_pdl": True} if overlapped else {}),
        )  # fmt: skip


def partial_results(workspace: AttentionWorkspace | None) -> tuple[torch.Tensor | None, ...]:
    """Where splits leave what they have found; nowhere without a workspace."""
    if workspace is None:
        return (None,) * 3
    return (workspace.acc, workspace.peak, workspace.total)


class _Call(AttentionCall):
    @property
    def group(self) -> int:
        return int(self.query.shape[1] // self.kv_cache.shape[1])

    @property
    def small(self) -> bool:
        return self.query.dtype in FP8

    @property
    def computed(self) -> torch.dtype:
        return torch.float16 if self.small else self.query.dtype

    def most_keys(self) -> int:
        bound = self.max_seq_len or self.block_table.shape[1] * self.kv_cache.shape[2]
        return int(min(bound, self.window + self.max_rows) if self.window else bound)

    def tiles(self, plan: Plan) -> int:
        return cdiv(self.max_rows * self.group, plan.tile.rows)

    def plan(self, workspace: AttentionWorkspace | None, num_splits: int | None) -> Plan:
        return choose_plan(self.sizes(workspace), num_splits)

    def sizes(self, workspace: AttentionWorkspace | None) -> Sizes:
        sizes = Sizes(
            rows=self.max_rows * self.group, head=self.head_pad, dtype=self.computed,
            num_reqs=self.num_reqs, kv_heads=self.kv_cache.shape[1], keys=self.most_keys(),
            window=self.window > 0, draft=self.draft, mixed=self.mixed,
        )  # fmt: skip
        if workspace is None:
            return sizes
        return sizes._replace(
            most_splits=self.room(workspace),
            multiprocessors=workspace.multiprocessors,
            capability=workspace.capability,
            native=self.small and native(workspace.capability, self.computed),
        )

    def check(self, out: torch.Tensor, workspace: AttentionWorkspace | None) -> None:
        query, kv_cache = self.query, self.kv_cache
        if kv_cache.shape[3] != 2 * query.shape[2] or query.shape[1] % kv_cache.shape[1]:
            raise ValueError(
                f"a query of {tuple(query.shape)} does not fit a KV cache of "
                f"{tuple(kv_cache.shape)}"
            )
        if kv_cache.dtype not in (FP8 if self.small else (query.dtype, *FP8)):
            raise ValueError(
                f"the KV cache has dtype {kv_cache.dtype}, the query {query.dtype}: they must be "
                "equal unless the cache is e4m3"
            )
        if self.small and workspace is not None:
            refuse_without_hardware(workspace.capability)
        if out.dtype in FP8:
            raise ValueError(f"the output has dtype {out.dtype}: it must have 16 or 32 bits")
        scratch, plain = self.scratch, "output" if self.small else "query"
        wanted = out.dtype if self.small else query.dtype
        if scratch is not None and scratch.dtype != wanted:
            raise ValueError(f"the scratch has dtype {scratch.dtype}, the {plain} {wanted}")
        if self.window and not self.draft and self.row_depths is None:
            raise ValueError(f"a window of {self.window} keys needs the depths of rows")
        check_rows(query, kv_cache, out)


def tree_attention(
    batch: TreeBatch | DraftBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
    num_splits: int | None = None,
    plan: Plan | None = None,
) -> None:
    """Attention of the last ``num_rows[r]`` rows of each request's query, or of a level's frontier
    in the draft, whose scratch holds the level's own K/V already; see `write_scratch`.

    No device value is read on the host, so the call can be captured. All sizes in a captured graph
    are upper bounds. Raises `ValueError` if shapes, dtypes or strides don't match.

    Args:
        batch: its query may be e4m3 if its cache is, from compute capability 8.9 on.
        out: like the query, or in 16 or 32 bits if that is e4m3; other rows stay untouched.
        workspace: receives partial results; None means one split.
        num_splits: forces the number of splits, `plan` all of how it is computed.
    """
    call = _call(batch)
    if call.num_reqs == 0:
        return
    call.check(out, workspace)
    if plan is None:
        plan = call.plan(workspace, num_splits)
    _launch_splits(call, out, workspace, plan)
    used = UsedSplits(call.kv_lens, plan.tile.keys, call.window, call.chunked)
    call.combine(
        out, workspace, plan.splits, plan.combine_warps, width=plan.combine_width,
        overlapped=plan.overlapped, used=used if plan.skip_empty else None,
    )  # fmt: skip


def plan_of(batch: TreeBatch | DraftBatch, workspace: AttentionWorkspace | None) -> Plan:
    """How a batch is computed where nothing is forced; host values alone decide."""
    return _call(batch).plan(workspace, None)


def _call(batch: TreeBatch | DraftBatch) -> _Call:
    if isinstance(batch, TreeBatch):
        return _Call(batch, kv_lens=batch.seq_lens)
    return _Call(batch, kv_lens=batch.prefix_lens, max_rows=batch.topk, scratch=batch.scratch_kv)


def _launch_splits(
    call: _Call, out: torch.Tensor, workspace: AttentionWorkspace | None, plan: Plan
) -> None:
    tile, splits, tiles = plan.tile, plan.splits, call.tiles(plan)
    query, kv_cache, scratch = call.query, call.kv_cache, call.scratch
    kv_heads, block_size = kv_cache.shape[1:3]
    fp8 = conversion(kv_cache, query.dtype)
    numbers = torch.float8_e4m3fn if fp8 == PRODUCTS else torch.uint8
    split_kernel[(call.num_reqs * tiles, kv_heads, call.parts(splits))](
        query.view(numbers) if call.small else query, kv_cache.view(numbers) if fp8 else kv_cache,
        out, *partial_results(workspace), call.query_start_loc, call.kv_lens, call.block_table,
        call.row_masks, call.row_depths, call.num_rows, scratch, call.ancestors, call.sinks,
        call.q_scale if call.small else None, call.k_scale, call.v_scale, call.scale, call.soft_cap,
        call.level, splits,
        *query.stride()[:2], *out.stride()[:2], *kv_cache.stride()[:3], call.block_table.stride(0),
        *(scratch.stride()[:3] if scratch is not None else (0, 0, 0)),
        # Trees of all depths share the compiled kernel.
        call.ancestors.stride(1) if call.ancestors is not None else 0,
        **call.shared(), HEAD=query.shape[2], HEAD_PAD=call.head_pad, GROUP=call.group,
        BLOCK_SIZE=block_size, TILES=tiles, BLOCK_M=tile.rows, BLOCK_N=tile.keys, FP8=fp8,
        HAS_CAP=call.soft_cap > 0, WINDOW=call.window, CHUNKED=call.chunked, SPLIT=splits > 1,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", AHEAD=plan.ahead,
        EDGES=plan.edges and call.window > 0 and not call.draft,
        SKIP_EMPTY=plan.skip_empty and splits > 1, OVERLAPPED=plan.overlapped and splits > 1,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@Kernel
@triton.jit(do_not_specialize=["level"])
def _scratch_kernel(
    key, value, scratch, level,
    key_row_stride, key_head_stride, value_row_stride, value_head_stride,
    scratch_req_stride, scratch_slot_stride, scratch_head_stride,
    TOPK: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, KEY_PAD)
    in_key = d < KEY
    e = tl.arange(0, VALUE_PAD)
    in_value = e < VALUE
    k = tl.load(key + row * key_row_stride + head * key_head_stride + d, mask=in_key)
    v = tl.load(value + row * value_row_stride + head * value_head_stride + e, mask=in_value)
    slot = level * TOPK + row % TOPK
    at = row // TOPK * scratch_req_stride + slot * scratch_slot_stride + head * scratch_head_stride
    tl.store(scratch + at + d, k, mask=in_key)
    tl.store(scratch + at + KEY + e, v, mask=in_value)


def write_scratch(
    key: torch.Tensor,
    value: torch.Tensor,
    scratch_kv: torch.Tensor,
    level: int,
    num_reqs: int,
    topk: int,
) -> None:
    """Store the K/V of a level's frontier at scratch slots ``level * topk .. + topk - 1``. `key`
    and `value` are ``[num_reqs * topk, kv_heads, size]``, last dimension contiguous; with MLA the
    latent, of one head, and the rotated part of the key. `scratch_kv` is of the same dtype,
    ``[max_reqs, steps * topk, kv_heads, key_size + value_size]``."""
    if num_reqs == 0:
        return
    heads, key_size = key.shape[1:]
    value_size = value.shape[2]
    _scratch_kernel[(num_reqs * topk, heads)](
        key, value, scratch_kv, level,
        *key.stride()[:2], *value.stride()[:2], *scratch_kv.stride()[:3],
        TOPK=topk, KEY=key_size, KEY_PAD=next_power_of_2(key_size), VALUE=value_size,
        VALUE_PAD=next_power_of_2(max(value_size, 1)), num_warps=1,
    )  # fmt: skip
