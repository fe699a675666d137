"""Tiny models with sliding windows, chunks, attention sinks and K/V that layers share."""

import gc
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engines.pairs import Pair
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.latent_models import write_deepseek
from tests.support.models.random_models import USUAL, write_random

WINDOW, BLOCK = 16, 32
"""The window is shorter than most prompts, so that blocks leave it while a request runs."""


def windowed_pair(folder: Path) -> Pair:
    """Copy the shipped pair, with a window in every other layer of the target, and in the draft."""
    kinds = ["sliding_attention", "full_attention"] * 3
    with_windows(SHIPPED / "target", folder / "target", kinds)
    with_windows(SHIPPED / "eagle3", folder / "eagle3", kinds[:1])
    shutil.copy(SHIPPED / "prompts.json", folder)
    return Pair.load(folder)


def with_windows(source: Path, folder: Path, kinds: list[str]) -> Path:
    """Copy a checkpoint, and give some of its layers a window."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"sliding_window": WINDOW, "layer_types": kinds}
    file.write_text(json.dumps(config))
    return folder


def write_gpt_oss(folder: Path, *, experts: float = 1.0, **sizes: Any) -> Path:
    """Write a random gpt-oss of four layers; `write_eagle3`'s head has its sizes.

    ``experts``: factor of what experts add. In 16 bits random routers now and then take another
    expert than in float32, which changes a token as much as the expert weighs.
    """
    usual: dict[str, Any] = {
        "num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 1024,
        },
        "pad_token_id": None,
    }  # fmt: skip

    def edit(model: Any) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
            if name.endswith("experts.down_proj"):
                parameter.mul_(experts)

    return write_random(folder, "GptOssForCausalLM", edit=edit, **USUAL | usual | sizes)


def write_gemma3(folder: Path, **sizes: Any) -> Path:
    """Write a random Gemma 3 with windows in five of six layers.

    Its output head is not the embedding, or each token would be followed by itself.
    """
    usual: dict[str, Any] = {
        "num_hidden_layers": 6, "query_pre_attn_scalar": 32, "sliding_window": WINDOW,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "initializer_range": 0.15,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 2,
    }  # fmt: skip
    return write_random(folder, "Gemma3ForCausalLM", **USUAL | usual | sizes)


def write_llama4(folder: Path) -> Path:
    """Write a random Llama 4 without experts, with chunks in every other layer."""
    sizes: dict[str, Any] = {
        "intermediate_size_mlp": 64, "num_hidden_layers": 4, "attention_chunk_size": BLOCK,
        "moe_layers": [], "interleave_moe_layer_step": 100, "no_rope_layers": [1, 0] * 2,
        "pad_token_id": None,
    }  # fmt: skip
    return write_random(folder, "Llama4ForCausalLM", **USUAL | sizes)


_GEMMA4: dict[str, Any] = {
    "global_head_dim": 64, "sliding_window": WINDOW, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 0, "pad_token_id": 0, "bos_token_id": 2,
}  # fmt: skip


def write_gemma4(folder: Path) -> Path:
    """Write a random Gemma 4 whose last two layers read K/V of earlier ones."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = USUAL | _GEMMA4 | {"num_hidden_layers": 4, "layer_types": kinds}

    def edit(model: Any) -> None:
        # Otherwise each token would be followed by itself, because the output head is the
        # embedding.
        model.model.embed_tokens.weight.mul_(0.05)

    return write_random(folder, "Gemma4ForCausalLM", edit=edit, **sizes)


def write_gemma4_assistant(folder: Path, *, ordered: bool = False) -> Path:
    """Write a random assistant for `write_gemma4`: a layer with a window, and one without."""
    text = USUAL | _GEMMA4 | {
        "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 0,
    }  # fmt: skip

    def edit(model: Any) -> None:
        import torch

        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(512))

    sizes: dict[str, Any] = {"backbone_hidden_size": 64, "num_centroids": 16}
    sizes |= {"centroid_intermediate_top_k": 4}
    sizes |= {"text_config": text, "use_ordered_embeddings": ordered}
    return write_random(folder, "Gemma4AssistantForCausalLM", seed=1, edit=edit, **sizes)


@dataclass(frozen=True)
class TrueShape:
    """A target.

    Attributes:
        backend: the attention backend that vLLM takes on Hopper.
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
