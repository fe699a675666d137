"""Finds the tower of a loaded model, and the obstacles to capturing it."""

from typing import Any

import torch
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.encoder_cudagraph_defs import EncoderCudaGraphConfig

from vllm_graft.graph_runners.vision.towers.adapter import adapter_of
from vllm_graft.graph_runners.vision.towers.grid_tower import GridTower
from vllm_graft.graph_runners.vision.towers.plain_tower import PlainTower
from vllm_graft.graph_runners.vision.towers.tower import Tower


def tower_of(
    model: Any,
    config: EncoderCudaGraphConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_items: int,
    max_frames: int,
) -> Tower:
    """The tower of a model: its adapter, or the tower that fits its protocol methods. `config` is
    how the model describes itself. vLLM limits a batch's items and frames."""
    if (adapter := adapter_of(model)) is not None:
        return adapter
    stock = SupportsEncoderCudaGraph.postprocess_encoder_output
    own = getattr(type(model), "postprocess_encoder_output", stock) is not stock
    if hasattr(model, "_get_grid_thw_by_modality") and hasattr(model, "visual") and not own:
        return GridTower(model, config, device, dtype)
    return PlainTower(model, config, max_items, max_frames)


def obstacles(model: Any, tower: Tower, reads_device: bool) -> str | None:
    """Why no batch of this model may be captured, in a word; None if it may. With `reads_device`,
    captured regions may read device values on the host."""
    layers = [layer for layer in model.modules() if isinstance(layer, MMEncoderAttention)]
    # Dynamic FP8 attention updates its scales and a Python counter in each pass.
    if any(getattr(layer, "_fp8_dynamic_scale", False) for layer in layers):
        return "fp8_dynamic_scales"
    # vLLM's SDPA path splits by segment lengths, which it reads on the host.
    sdpa = any(layer.attn_backend == AttentionBackendEnum.TORCH_SDPA for layer in layers)
    if sdpa and isinstance(tower, GridTower) and not reads_device:
        return "torch_sdpa"
    return None


def packs_offsets(model: Any) -> bool:
    """Whether attention offsets are packed as FlashInfer's are, so that they cannot be padded."""
    return any(
        layer.attn_backend == AttentionBackendEnum.FLASHINFER
        for layer in model.modules()
        if isinstance(layer, MMEncoderAttention)
    )
