"""Tree attention in two passes: FlashAttention 3 over the prefix, then the tree's own rows.

Where a request's rows times the heads that share K/V fill a tile of 128, FlashAttention 3
(arXiv:2407.08608) computes faster than our Triton kernel. It has no tree mask, so it attends to the
keys before the tree, which all rows see. By its log-sum-exp the second pass merges the tree's keys.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
from vllm_graft.spec_decode.targets.dense.window import chunk_of, window_of

if TYPE_CHECKING:
    from vllm.model_executor.layers.attention import Attention

    from vllm_graft.spec_decode.trees.batch import LatentBatch, TreeBatch

KernelName = Literal["triton", "flash"]
"""``triton``: one Triton kernel, split over the keys. ``flash``: FlashAttention 3 over the prefix,
then a small kernel over the tree's own rows."""

CONTEXTS = (512, 2048, 8192, 32768)
"""Keys per request at which the kernels are compared, up to the model's longest context."""

BATCHES = (1, 4, 16, 64)
"""Numbers of requests at which they are compared, up to the engine's largest."""

MAX_KEYS = 1 << 20
"""Keys of all requests above which a point is left out: few caches hold more, and it takes long."""

_CACHE_BYTES = 256 << 20
"""Bytes of K/V in a measurement, five times a large L2 cache."""


class Size(NamedTuple):
    """What a captured graph fixes."""

    num_reqs: int
    rows: int


class Point(NamedTuple):
    """The sizes of one measurement."""

    num_reqs: int
    rows: int
    context: int

    @property
    def size(self) -> Size:
        return Size(self.num_reqs, self.rows)


Costs = Mapping[Point, Mapping[KernelName, float]]
"""Microseconds per layer of each kernel."""


def points(widths: Collection[int], max_reqs: int, max_model_len: int) -> list[Point]:
    """Where to measure `widths` (root and nodes): at most three of them."""
    ordered = sorted(set(widths))
    chosen = sorted({ordered[0], ordered[len(ordered) // 2], ordered[-1]}) if ordered else []
    batches = sorted({min(batch, max_reqs) for batch in BATCHES})
    contexts = [context for context in CONTEXTS if context <= max_model_len] or [max_model_len]
    return [
        Point(batch, rows, context)
        for rows in chosen
        for batch in batches
        for context in contexts
        # The shortest context is measured for every size, so that each size has a measurement.
        if context == contexts[0] or batch * context <= MAX_KEYS
    ]


def choose(costs: Costs, size: Size) -> KernelName:
    """The kernel whose worst loss against the better one, over all contexts, is the smallest. A
    graph is captured for one size and replayed at any context. A size that was not measured takes
    the choice of the nearest measured size, by the ratios of requests and of rows; of two equally
    near ones the larger decides."""
    nearest = min({point.size for point in costs}, key=lambda known: _distance(known, size))
    losses: defaultdict[KernelName, float] = defaultdict(float)
    for point, times in costs.items():
        if point.size == nearest:
            best = min(times.values())
            for kernel, time in times.items():
                losses[kernel] = max(losses[kernel], time / best)
    # Ties go to the first name in the alphabet, so that all ranks agree.
    return min(losses, key=lambda kernel: (losses[kernel], kernel))


def _distance(known: Size, size: Size) -> tuple[float, int]:
    ratios = (math.log(a / b) for a, b in zip(known, size))
    return round(sum(map(abs, ratios)), 9), -known.num_reqs * known.rows


def random_masks(rows: int, generator: torch.Generator) -> torch.Tensor:
    """i64 ``[rows]``, masks of a random tree of ``rows`` nodes."""
    masks: list[int] = []
    for node in range(rows):
        parent = int(torch.randint(0, max(node, 1), (1,), generator=generator))
        bits = (masks[parent] if node else 0) | 1 << node
        masks.append(bits - (1 << 64) if bits >> 63 else bits)
    return torch.tensor(masks, dtype=torch.int64)


def random_trees(
    point: Point, block_size: int, block_bytes: int, device: torch.device | str
) -> tuple[int, dict[str, Any]]:
    """What batches of random trees share, for timing: all have ``point.rows`` rows. Returns blocks
    of the cache (`_CACHE_BYTES` at most: longer contexts share some) and a batch's fields."""
    keys, rows = max(point.context, point.rows), point.num_reqs * point.rows
    per_request = cdiv(keys, block_size)
    blocks = max(1, min(point.num_reqs * per_request, _CACHE_BYTES // block_bytes))
    generator = torch.Generator().manual_seed(0)
    masks = random_masks(point.rows, generator).repeat(point.num_reqs)
    table = torch.randint(blocks, (point.num_reqs, per_request), generator=generator)

    def filled(value: int) -> torch.Tensor:
        return torch.full((point.num_reqs,), value, dtype=torch.int32, device=device)

    starts = torch.arange(0, rows + 1, point.rows, dtype=torch.int32, device=device)
    return blocks, {
        "query_start_loc": starts,
        "prefix_lens": filled(keys - point.rows),
        "block_table": table.to(device, torch.int32),
        "row_masks": masks.to(device),
        "num_rows": filled(point.rows),
        "max_rows": point.rows,
        "max_seq_len": keys,
    }


@dataclass
class KernelChoice:
    """The kernel for each size of one engine's batches. `why`: why there is no choice; empty where
    the measured times decide. `declined`: layer calls that took the Triton kernel although
    ``flash`` was chosen, outside of graphs: requests differ in rows, or the query is not quantized
    beside an fp8 cache."""

    asked: Literal["auto", "triton", "flash"]
    why: str = ""
    costs: Costs = field(default_factory=dict)
    used: dict[Size, KernelName] = field(default_factory=dict)
    declined: int = 0

    def of(self, num_reqs: int, rows: int) -> KernelName:
        """The kernel for a batch of `num_reqs` requests of `rows` rows each; it never changes."""
        size = Size(num_reqs, rows)
        if size not in self.used:
            measured = choose(self.costs, size) if self.costs else "triton"
            self.used[size] = measured if self.asked == "auto" else self.asked
        return self.used[size]

    def report(self) -> dict[str, Any]:
        """Plain values for ``graft_info()``."""
        return {
            "asked": self.asked,
            "why": self.why,
            "microseconds": [
                {**point._asdict(), **{kernel: round(time, 1) for kernel, time in times.items()}}
                for point, times in self.costs.items()
            ],
            "used": {f"{size.num_reqs}x{size.rows}": kernel for size, kernel in self.used.items()},
            "declined": self.declined,
        }


_TILE = 128
"""Query rows of a program of FlashAttention 3, times the heads that share K/V."""

_SPLIT_BYTES = 128 << 20
"""Bytes that the partial results of all splits may take; in a graph they stay in its pool."""

_MAX_SPLITS = 64


def num_splits(batch: TreeBatch, multiprocessors: int) -> int:
    """See `bounded_splits`."""
    num_tokens, num_heads, head_size = batch.query.shape
    kv_heads = batch.kv_cache.shape[1]
    programs = kv_heads * cdiv(batch.max_rows * (num_heads // kv_heads), _TILE)
    return bounded_splits(num_tokens * num_heads, head_size, programs, multiprocessors)


def bounded_splits(rows: int, size: int, programs: int, multiprocessors: int) -> int:
    """Upper bound of the splits of a request's keys, within which FlashAttention decides. One long
    request may fill the device, and partial results keep to a budget. The bound depends on host
    values only, so that buffers in a captured graph stay large enough. `rows` are those of all
    requests times query heads, `size` is that of a value, `programs` are of a request and split."""
    fit = int(_SPLIT_BYTES // (4 * rows * (size + 1)))
    return max(1, min(int(multiprocessors // programs), fit, _MAX_SPLITS))


def scheduled(batch: TreeBatch | LatentBatch, **sizes: Any) -> torch.Tensor:
    """FlashAttention's schedule of the first pass, int32, which all layers of a forward pass share.
    The host reads no device value."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    plan: torch.Tensor = get_scheduler_metadata(
        batch_size=batch.num_reqs, max_seqlen_q=batch.max_rows, max_seqlen_k=batch.max_seq_len,
        num_heads_q=batch.query.shape[1], cache_seqlens=batch.prefix_lens,
        qkv_dtype=batch.query.dtype, cu_seqlens_q=batch.query_start_loc, causal=False, **sizes,
    )  # fmt: skip
    return plan


def attended_prefix(
    batch: TreeBatch | LatentBatch, plan: torch.Tensor | None, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 3 over the keys before each tree, which are `given` with their queries."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    out, lse = flash_attn_varlen_func(
        cu_seqlens_q=batch.query_start_loc, max_seqlen_q=batch.max_rows,
        seqused_k=batch.prefix_lens, max_seqlen_k=batch.max_seq_len, block_table=batch.block_table,
        softmax_scale=batch.scale, causal=False, return_softmax_lse=True, scheduler_metadata=plan,
        fa_version=3, **given,
    )  # fmt: skip
    return out, lse


def plan_prefix(batch: TreeBatch, *, multiprocessors: int) -> torch.Tensor:
    """`scheduled` for K and V of heads."""
    kv_heads, block_size = batch.kv_cache.shape[1:3]
    return scheduled(
        batch,
        num_heads_kv=kv_heads,
        headdim=batch.query.shape[2],
        page_size=block_size,
        has_softcap=batch.soft_cap > 0,
        num_splits=num_splits(batch, multiprocessors),
    )


def flash_prefix_attention(
    batch: TreeBatch, *, multiprocessors: int, plan: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pass by vLLM's FlashAttention 3; `plan` is `plan_prefix` of the same batch."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    # TMA requires aligned strides, even of the dimension of a single KV head.
    key, value = (
        canonicalize_singleton_dim_strides(part)
        for part in batch.kv_cache.transpose(1, 2).split(batch.query.shape[2], dim=-1)
    )
    scales = (batch.num_reqs, batch.kv_cache.shape[1])
    return attended_prefix(
        batch, plan, q=batch.query, k=key, v=value, softcap=batch.soft_cap,
        q_descale=None if batch.q_scale is None else batch.q_scale.expand(scales),
        k_descale=None if batch.k_scale is None else batch.k_scale.expand(scales),
        v_descale=None if batch.v_scale is None else batch.v_scale.expand(scales),
        num_splits=num_splits(batch, multiprocessors),
    )  # fmt: skip


def two_pass_attention(
    batch: TreeBatch | LatentBatch,
    out: torch.Tensor | None,
    *,
    multiprocessors: int,
    prefix_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = flash_prefix_attention,
    own_attention: Callable[..., None] = attend_own_rows,
) -> torch.Tensor:
    """Attention of tree rows by two kernels; the result equals that of one kernel. `batch`: its
    queries have at most ``max_rows`` rows each. `out`: like the query, bf16 or fp16. None completes
    what the first pass returns, in place, and returns it; `attend_own_latents` can do so.
    `prefix_attention`, `own_attention`: see `Passes`."""
    if batch.num_reqs == 0:
        return torch.zeros_like(batch.query) if out is None else out
    prefix_out, prefix_lse = prefix_attention(batch, multiprocessors=multiprocessors)
    out = prefix_out if out is None else out
    own_attention(batch, prefix_out, prefix_lse, out)
    return out


class Passes(NamedTuple):
    """The two passes over one kind of keys.

    Attributes:
        plan: makes the schedule of the first pass.
        prefix: attends to the keys before the tree, ``prefix_lens`` of them, without a mask.
            Returns ``[num_tokens, num_heads, size]`` and its log-sum-exp (natural logarithm), f32
            ``[num_heads, num_tokens]``. Both are arbitrary for a request without a prefix.
        own: the second pass, which says what becomes of rows that are of no tree.
    """

    plan: Callable[..., torch.Tensor]
    prefix: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    own: Callable[..., None]


PLAIN_PASSES = Passes(plan_prefix, flash_prefix_attention, attend_own_rows)
"""Both passes over K and V."""


@dataclass
class TwoPass:
    """The two passes, for layers of one geometry and the batches for which they are chosen."""

    choice: KernelChoice
    passes: Passes = field(default_factory=lambda: PLAIN_PASSES)
    _planned: Any = None
    _capturing: bool = False
    _plan: torch.Tensor | None = None

    def takes(self, metadata: Any, max_rows: int, *, alike: bool) -> bool:
        """Whether the two passes compute a batch whose requests all verify a tree, of `max_rows`.
        Only host values decide. `alike` says that query and cache are both fp8 or neither, as
        FlashAttention requires."""
        num_reqs = metadata.query_start_loc.shape[0] - 1
        if self.choice.of(num_reqs, max_rows) != "flash":
            return False
        if alike and metadata.num_actual_tokens == num_reqs * max_rows:
            return True
        self.choice.declined += 1
        return False

    def attend(
        self,
        batch: TreeBatch | LatentBatch,
        out: torch.Tensor | None,
        metadata: Any,
        *,
        multiprocessors: int,
    ) -> torch.Tensor:
        """Compute a batch for which `takes` was true, and return its rows. `batch`: the batch,
        without padding rows in its query. `out`: like the query, padding rows stay untouched; or
        None, as in `two_pass_attention`. `metadata`: the object that `takes` saw; each forward pass
        has its own."""
        # A plan made before a capture is not in the captured graph: its replays would read the
        # plan of another batch.
        capturing = torch.cuda.is_current_stream_capturing()
        if self._planned is not metadata or self._capturing != capturing:
            self._plan = self.passes.plan(batch, multiprocessors=multiprocessors)
            self._planned, self._capturing = metadata, capturing
        return two_pass_attention(
            batch,
            None if out is None else out[: batch.query.shape[0]],
            multiprocessors=multiprocessors,
            prefix_attention=functools.partial(self.passes.prefix, plan=self._plan),
            own_attention=self.passes.own,
        )


def why_not(layer: Attention) -> str | None:
    """Why a layer's trees can't be attended in two passes; None if they can."""
    impl: Any = layer.impl
    backend = layer.get_attn_backend().get_name()
    if backend != "FLASH_ATTN":
        return f"the attention backend is {backend}, not FLASH_ATTN"
    if impl.vllm_flash_attn_version != 3:
        return f"vLLM uses FlashAttention {impl.vllm_flash_attn_version} here, not 3"
    if window_of(impl):
        return "the layer has a sliding window, whose edge FlashAttention counts by slots"
    if chunk_of(layer):
        return "the layer has chunked attention, whose batches vLLM splits by chunks"
    if impl.batch_invariant_enabled:
        return "VLLM_BATCH_INVARIANT is set, and splits depend on the batch"
    if impl.kv_cache_dtype.startswith("fp8") and not impl.supports_quant_query_input:
        return f"queries are not quantized beside the {impl.kv_cache_dtype} K/V cache"
    return None
