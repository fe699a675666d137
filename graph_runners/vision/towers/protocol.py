"""Which tower a model is, and what stands in the way of graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_graft.graph_runners.vision.towers.adapter import adapter_of
from vllm_graft.graph_runners.vision.towers.grid_tower import GridTower
from vllm_graft.graph_runners.vision.towers.plain_tower import PlainTower
from vllm_graft.graph_runners.vision.towers.tower import Tower

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig


def tower_of(
    model: Any,
    config: EncoderCudaGraphConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_items: int,
    max_frames: int,
) -> Tower:
    """The adapter of a model that has one, or what fits the protocol's methods."""
    if (adapter := adapter_of(model)) is not None:
        return adapter
    stock = SupportsEncoderCudaGraph.postprocess_encoder_output
    own = getattr(type(model), "postprocess_encoder_output", stock) is not stock
    if hasattr(model, "_get_grid_thw_by_modality") and hasattr(model, "visual") and not own:
        return GridTower(model, config, device, dtype)
    return PlainTower(model, config, max_items, max_frames)


def obstacles(model: Any, tower: Tower, reads_device: bool) -> str | None:
    """Why no batch of this model may be captured, in a word; None if nothing stands in the way."""
    layers = [layer for layer in model.modules() if isinstance(layer, MMEncoderAttention)]
    # It moves its scales, and a counter in Python, in each pass.
    if any(getattr(layer, "_fp8_dynamic_scale", False) for layer in layers):
        return "fp8_dynamic_scales"
    # It splits by segment lengths that it reads on the host.
    sdpa = any(layer.attn_backend == AttentionBackendEnum.TORCH_SDPA for layer in layers)
    if sdpa and isinstance(tower, GridTower) and not reads_device:
        return "torch_sdpa"
    return None


def packs_offsets(model: Any) -> bool:
    """Whether attention offsets are packed, as FlashInfer's, and cannot be padded like others."""
    return any(
        layer.attn_backend == AttentionBackendEnum.FLASHINFER
        for layer in model.modules()
        if isinstance(layer, MMEncoderAttention)
    )
