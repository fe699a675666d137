"""Targets whose layers have the sizes of published models; few layers, weights made up."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.models.latent_models import write_deepseek
from tests.support.models.window_models import write_gemma3, write_gpt_oss


@dataclass(frozen=True)
class TrueShape:
    """A target.

    Attributes:
        name: the model's.
        write: writes its checkpoint into a folder, with other sizes if they are given.
        backend: the attention backend that vLLM takes on Hopper.
        block_size: slots of a block.
        near: largest gap of log-probabilities that rounding to bfloat16 explains. Between such
            models of 512 channels in float32 and in bfloat16 gaps of the best two tokens differ by
            up to 0.21 (gpt-oss), 0.09 (Gemma 3) and 0.10 (DeepSeek) on a CPU.
        windows: windows of its layers, 0 for none.
    """

    name: str
    write: Callable[..., Path]
    backend: str = "FLASH_ATTN"
    block_size: int = 16
    near: float = 0.25
    windows: list[int] = field(default_factory=list)


def gpt_oss(folder: Path, **sizes: Any) -> Path:
    """Write two layers of gpt-oss-20b, one of them with a window; 3.4 GB."""
    usual: dict[str, Any] = {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    return _scaled(write_gpt_oss, folder, usual | sizes, experts=0.1)


def gemma3(folder: Path, **sizes: Any) -> Path:
    """Write six layers of Gemma 3 4B, five of them with windows; 1.1 GB."""
    usual: dict[str, Any] = {
        "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
    }  # fmt: skip
    return _scaled(write_gemma3, folder, usual | sizes)


def deepseek_v2_lite(folder: Path, **sizes: Any) -> Path:
    """Write three layers of DeepSeek-V2-Lite, the first one dense; 2.5 GB."""
    usual: dict[str, Any] = {
        "hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16,
        "num_key_value_heads": 16, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    }  # fmt: skip

    def write(folder: Path, **given: Any) -> Path:
        return write_deepseek(folder, heads=16, layers=3, **given)

    return _scaled(write, folder, usual | sizes)


def _scaled(write: Callable[..., Path], folder: Path, sizes: dict[str, Any], **others: Any) -> Path:
    """Write a target whose layers weigh as much as the residual stream, whatever their width."""
    import torch

    scale = 1.2 * sizes["hidden_size"] ** -0.5
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(folder, initializer_range=scale, device=device, **sizes, **others)
    if torch.cuda.is_available():
        # The engines that come next need the device's memory.
        gc.collect()
        torch.cuda.empty_cache()
    return folder


TRUE_SHAPES = [
    TrueShape("gpt-oss", gpt_oss, near=0.4, windows=[0, 128]),
    TrueShape("gemma-3", gemma3, near=0.1, windows=[0] + [1024] * 5),
    TrueShape("deepseek-v2-lite", deepseek_v2_lite, "FLASH_ATTN_MLA", 64),
]
