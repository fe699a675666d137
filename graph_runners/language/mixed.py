"""FULL graphs of mixed batches: prompts beside requests that verify trees. vLLM launches such a
step piece by piece, which keeps the host busy for longer than the device. All that differs between
batches (lengths, tree rows per request, slots) is read on the device, so one graph of n rows fits
every batch of at most n rows."""

from collections.abc import Sequence

from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_graft.base.errors import ConfigError
from vllm_graft.seams import graph_tables

_SMALLEST = 8
"""Rows of the smallest graph: a prompt of a few tokens and a tree."""

_STEP = 1.2
"""Smallest ratio of two sizes. Padding costs less the smaller it is, but there are more graphs."""


def mixed_sizes(capture_sizes: Sequence[int]) -> list[int]:
    """Rows of the graphs to capture, ascending: the engine's sizes, thinned from the largest."""
    kept: list[int] = []
    for size in sorted(capture_sizes, reverse=True):
        if size >= _SMALLEST and (not kept or size * _STEP <= kept[-1]):
            kept.append(size)
    return kept[::-1]


def plan_mixed_graphs(manager: CudaGraphManager, asked: bool | None, flag: str) -> None:
    """Plan graphs of mixed batches as the configuration says, before the target's manager captures.
    `asked` None plans them where vLLM runs mixed batches piecewise and nothing forbids it. Raises
    `ConfigError` if they are asked for and can't be captured."""
    if asked is False:
        return
    if asked is None and manager.cudagraph_mode.mixed_mode() != CUDAGraphMode.PIECEWISE:
        return
    given = manager.compilation_config.cudagraph_capture_sizes or []
    why = why_no_mixed_graphs(manager)
    if not why and not (sizes := mixed_sizes(given)):
        why = f"compilation_config.cudagraph_capture_sizes {given} has no size from {_SMALLEST} on"
    if not why:
        plan_mixed(manager, sizes)
    elif asked:
        raise ConfigError(f"{flag} is true, but {why}: change that, or drop {flag}")


def why_no_mixed_graphs(manager: CudaGraphManager) -> str:
    """Why a target's mixed batches can't be captured; empty if they can."""
    config = manager.vllm_config
    if manager.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
        return f"compilation_config.cudagraph_mode came out as {manager.cudagraph_mode.name}"
    if manager.max_num_reqs < 2:
        return "--max-num-seqs is 1"
    if config.model_config.supports_multimodal_inputs:
        return "the model takes images, audio or video besides text"
    if config.parallel_config.enable_dbo:
        return "--enable-dbo splits batches"
    return _uncapturable_layer(config)


def _uncapturable_layer(config: VllmConfig) -> str:
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    for name, layer in layers.items():
        if (spec := layer.get_kv_cache_spec(config)) is None:
            continue
        backend = layer.get_attn_backend()
        support = backend.get_builder_cls().get_cudagraph_support(config, spec)
        if support != AttentionCGSupport.ALWAYS:
            return f"{backend.get_name()} of layer {name} captures {support.name} only"
    return ""


def plan_mixed(manager: CudaGraphManager, sizes: Sequence[int]) -> None:
    """Plan FULL graphs of so many rows, ascending: chosen after uniform, before piecewise ones."""
    planned, serving, first = graph_tables.planned(manager), graph_tables.serving(manager), 1
    for size in sizes:
        for loras in manager.lora_capture_cases:
            desc = BatchExecutionDescriptor(
                CUDAGraphMode.FULL,
                num_tokens=size,
                num_reqs=min(size, manager.max_num_reqs),
                num_active_loras=loras,
            )
            planned.append(desc)
            for tokens in range(first, size + 1):
                candidates = serving.setdefault((tokens, loras), [])
                full = sum(each.cg_mode == CUDAGraphMode.FULL for each in candidates)
                candidates.insert(full, desc)
        first = size + 1
    graph_tables.plan(manager, planned)
