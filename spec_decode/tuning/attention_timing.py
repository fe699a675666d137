"""Times both kernels of tree attention on the device, once, when an engine starts."""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Self

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import info_once, warning_once
from vllm_graft.base.options import flag
from vllm_graft.seams.ranks import gather
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.e4m3 import native
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.targets.dense.layer import plain_query
from vllm_graft.spec_decode.targets.dense.two_pass import (
    MAX_KEYS,
    PLAIN_PASSES,
    Costs,
    KernelChoice,
    KernelName,
    Passes,
    Point,
    TwoPass,
    points,
    random_trees,
    why_not,
)
from vllm_graft.spec_decode.targets.latent.latent_layer import is_latent
from vllm_graft.spec_decode.targets.latent.latent_two_pass import (
    LATENT_PASSES,
    LatentGeometry,
    why_no_latent_passes,
)
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.tuning.scheduling import widths


class Geometry(NamedTuple):
    """The properties besides the batch on which attention's time depends."""

    num_heads: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    fp8: bool
    block_size: int

    @property
    def most_keys(self) -> int:
        """Keys of all requests above which a point is left out."""
        return MAX_KEYS

    @property
    def calls_timed(self) -> int:
        return 8

    @classmethod
    def of(cls, layer: Attention, dtype: torch.dtype, block_size: int) -> Self:
        impl: Any = layer.impl
        fp8 = is_quantized_kv_cache(impl.kv_cache_dtype)
        sizes = (layer.num_heads, layer.num_kv_heads, layer.head_size)
        return cls(*sizes, dtype, fp8, block_size)

    def problem(self, point: Point, device: torch.device | str) -> TreeBatch:
        """A batch of random trees, all with ``point.rows`` rows."""
        rows, dtype = point.num_reqs * point.rows, torch.float8_e4m3fn if self.fp8 else self.dtype
        block = (self.kv_heads, self.block_size, 2 * self.head_size)
        block_bytes = math.prod(block) * dtype.itemsize
        blocks, trees = random_trees(point, self.block_size, block_bytes, device)
        # The query is a slice of a wider tensor, as a fused QKV projection makes it.
        wide = (rows, self.num_heads + 2 * self.kv_heads, self.head_size)
        return TreeBatch(
            query=torch.randn(wide, device=device, dtype=self.dtype)[:, : self.num_heads],
            kv_cache=torch.randn(blocks, *block, device=device).to(dtype),
            seq_lens=trees["prefix_lens"] + point.rows,
            scale=self.head_size**-0.5,
            k_scale=torch.tensor(0.7, device=device) if self.fp8 else None,
            v_scale=torch.tensor([1.3], device=device) if self.fp8 else None,
            **trees,
        )

    def lengthen(self, batch: TreeBatch, keys: int) -> None:
        """Give each request so many keys, its tree's among them."""
        batch.seq_lens.fill_(keys)

    def calls(
        self, batch: TreeBatch, workspace: AttentionWorkspace, longest: int
    ) -> dict[KernelName, Callable[[], None]]:
        """A call of each kernel, for graphs whose requests have up to `longest` keys."""
        return {
            "triton": triton_call(batch, workspace, longest),
            "flash": flash_call(batch, workspace.multiprocessors, longest),
        }


def triton_call(
    batch: TreeBatch, workspace: AttentionWorkspace, max_seq_len: int
) -> Callable[[], None]:
    """A call of the Triton kernel over a batch, with an e4m3 query as an engine has it."""
    query = batch.query
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    batch = replace(batch, max_seq_len=max_seq_len)
    if batch.k_scale is None:
        return lambda: tree_attention(batch, out, workspace=workspace)
    small, one = query.to(torch.float8_e4m3fn), torch.ones((), device=query.device)
    if native(workspace.capability, out.dtype):
        batch = replace(batch, query=small, q_scale=one)
        return lambda: tree_attention(batch, out, workspace=workspace)

    def call() -> None:
        plain = plain_query(small, one, out.dtype)
        tree_attention(replace(batch, query=plain), out, workspace=workspace)

    return call


def flash_call(batch: TreeBatch, multiprocessors: int, max_seq_len: int) -> Callable[[], None]:
    """A call of the two passes over a batch of requests with equal rows, planned once per graph."""
    query = batch.query
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # `measure` fills `seq_lens` with other lengths, so the prefixes are computed again.
    prefix_lens = batch.seq_lens - batch.num_rows
    batch = replace(batch, prefix_lens=prefix_lens, max_seq_len=max_seq_len)
    if batch.k_scale is not None:
        q_scale = torch.ones((), device=query.device)
        batch = replace(batch, query=query.to(torch.float8_e4m3fn), q_scale=q_scale)
    both, metadata = TwoPass(KernelChoice("flash")), object()
    return lambda: both.attend(batch, out, metadata, multiprocessors=multiprocessors)


def graph_time(
    call: Callable[[], object],
    calls: int = 8,
    repeats: int = 5,
    stream: torch.cuda.Stream | None = None,
) -> float:
    """Median microseconds per call, of `calls` in one CUDA graph: host launches don't count."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # Not torch.cuda.graph: it empties the allocator's cache each time.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                call()
        finally:
            graph.capture_end()
        graph.replay()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    graph.reset()
    return float(statistics.median(times))


def measure(
    geometry: Geometry | LatentGeometry,
    where: Iterable[Point],
    workspace: AttentionWorkspace,
    max_model_len: int,
    device: torch.device | str,
) -> Costs:
    """Time both kernels at each point as a graph runs them: lengths may reach `max_model_len`.
    Points with more keys than the geometry's `most_keys` are left out. It takes about 2 GiB of
    device memory, which is given back after each size."""
    # One stream for all: the allocator does not reuse on one stream what another has freed.
    stream = torch.cuda.Stream()
    timed = functools.partial(graph_time, calls=geometry.calls_timed, stream=stream)
    where = [at for at in where if at.num_reqs * at.context <= geometry.most_keys]
    costs: dict[Point, dict[KernelName, float]] = {}
    # Drawing inputs takes longer than timing kernels: draw once per size, for its longest context.
    for _, group in itertools.groupby(where, key=lambda point: point.size):
        same = list(group)
        batch: Any = geometry.problem(max(same, key=lambda point: point.context), device)
        for point in same:
            geometry.lengthen(batch, max(point.context, point.rows))
            longest = max(max_model_len, point.context)
            both = geometry.calls(batch, workspace, longest)
            costs[point] = {name: timed(call) for name, call in both.items()}
        del batch
        torch.cuda.empty_cache()
    return costs


def choose_target_kernels(
    vllm_config: VllmConfig,
    config: TreeConfig,
    draft_layers: Collection[str],
    workspace: AttentionWorkspace,
    device: torch.device,
) -> list[KernelChoice]:
    """Choose the kernels for the target's tree rows before captures; see `choose_kernels`."""
    known: dict[str, Any] = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    layers = {
        name: layer
        for name, layer in known.items()
        if name not in draft_layers and (isinstance(layer, Attention) or is_latent(layer))
    }
    rows = widths(vllm_config, auto=config.shape == "auto")
    max_model_len = vllm_config.model_config.max_model_len
    return choose_kernels(
        layers, config.attention,
        points(rows, vllm_config.scheduler_config.max_num_seqs, max_model_len), workspace,
        max_model_len=max_model_len, dtype=vllm_config.model_config.dtype,
        block_size=vllm_config.cache_config.block_size, device=device,
    )  # fmt: skip


def choose_kernels(
    layers: Mapping[str, Any], asked: Literal["auto", "triton", "flash"], where: Collection[Point],
    workspace: AttentionWorkspace,
    *, max_model_len: int, dtype: torch.dtype, block_size: int, device: torch.device,
) -> list[KernelChoice]:  # fmt: skip
    """Give the target's layers, grafted already, the two passes besides the Triton kernel. Layers
    of one geometry share a choice between the two. All choices are returned. Raises `ConfigError`
    if ``flash`` was asked for and a layer can't have it."""
    both: dict[Geometry | LatentGeometry | str, TwoPass] = {}
    for name, layer in layers.items():
        kind = _LATENT if is_latent(layer) else _PLAIN
        why = "" if asked == "triton" else kind.why_not(layer) or ""
        if why and asked == "flash":
            raise ConfigError(
                f"{flag('tree', 'attention')} is 'flash', but layer {name} can't have it: {why}. "
                "Set it to 'auto' or 'triton'"
            )
        geometry = kind.geometry.of(layer, dtype, block_size)
        key = why or geometry
        if key not in both:
            choice = KernelChoice(asked, why)
            if asked == "auto" and not why:
                choice = _measured(choice, geometry, where, workspace, max_model_len, device)
            both[key] = TwoPass(choice, kind.passes)
        kind.holder(layer).two_pass = both[key]
    return [two_pass.choice for two_pass in both.values()]


class _Kind(NamedTuple):
    """A kind of layers: what their kernels are timed with, their two passes, why a layer can't have
    these, and the object of a layer that has them, as its ``two_pass``."""

    geometry: type[Geometry | LatentGeometry]
    passes: Passes
    why_not: Callable[[Any], str | None]
    holder: Callable[[Any], Any]


_PLAIN = _Kind(Geometry, PLAIN_PASSES, why_not, lambda layer: layer.impl)
_LATENT = _Kind(
    LatentGeometry, LATENT_PASSES, why_no_latent_passes, lambda layer: layer.tree_latents
)


def _measured(
    choice: KernelChoice,
    geometry: Geometry | LatentGeometry,
    where: Collection[Point],
    workspace: AttentionWorkspace,
    max_model_len: int,
    device: torch.device,
) -> KernelChoice:
    """The choice with measured times, or with the reason why there are none. Tensor-parallel ranks
    take the first rank's times, so that all attend by the same kernel. If a rank could not measure,
    none uses what another has measured."""
    begin = time.perf_counter()
    costs: Costs = {}
    why = ""
    try:
        costs = measure(geometry, where, workspace, max_model_len, device)
    except RuntimeError as error:
        why = f"FlashAttention 3 could not be timed here: {error}"
    measured: list[tuple[Costs, str]] = gather((costs, why))
    costs = measured[0][0]
    if why := next((reason for _, reason in measured if reason), ""):
        warning_once(f"vllm-graft computes tree attention by its Triton kernel alone: {why}")
        return replace(choice, why=why)
    took = time.perf_counter() - begin
    info_once(f"vllm-graft timed tree attention at {len(costs)} sizes, in {took:.1f} s")
    return replace(choice, costs=costs)
