"""Tiny Kimi Linear: layers with Kimi Delta Attention (KDA) and layers with MLA, in turn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.models.random_models import VOCABULARY
from vllm_graft.testing.models.llama import write_checkpoint

RANK, ROPE, NOPE = 512, 64, 128
"""Sizes of latents and of heads that are made of them: the true ones."""


def write_kimi_linear(
    folder: Path,
    *,
    heads: int = 2,
    head: int = 16,
    hidden: int = 64,
    layers: int = 4,
    dtype: str = "float32",
) -> Path:
    """Write a random Kimi Linear whose layers are dense; half of them have KDA, half MLA."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 1.2 * shape[-1] ** -0.5

    weights = {
        "model.embed_tokens": matrix(VOCABULARY, hidden) * hidden**0.5,
        "model.norm": torch.ones(hidden),
        "lm_head": matrix(VOCABULARY, hidden),
    }
    for place in range(layers):
        own = (_delta if place % 2 == 0 else _latent)(matrix, heads, head, hidden)
        own |= {
            "mlp.gate_proj": matrix(2 * hidden, hidden),
            "mlp.up_proj": matrix(2 * hidden, hidden),
            "mlp.down_proj": matrix(hidden, 2 * hidden),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        weights |= {f"model.layers.{place}.{name}": weight for name, weight in own.items()}
    # Parameters that are no layer's weight keep their names.
    named = {
        name if name.endswith(("A_log", "dt_bias")) else f"{name}.weight": weight
        for name, weight in weights.items()
    }
    exact = ("A_log", "dt_bias")
    tensors = {
        name: weight if name.endswith(exact) else weight.to(getattr(torch, dtype))
        for name, weight in named.items()
    }
    write_checkpoint(folder, tensors, _config(heads, head, hidden, layers, dtype))
    return folder


def _delta(matrix: Callable[..., Any], heads: int, head: int, hidden: int) -> dict[str, Any]:
    """Weights of a layer with KDA, whose states decay slowly."""
    import torch

    wide = heads * head
    of_inputs = {f"self_attn.{name}_proj": matrix(wide, hidden) for name in "qkv"}
    convolutions = {f"self_attn.{name}_conv1d": matrix(wide, 4) for name in "qkv"}
    return of_inputs | convolutions | {
        "self_attn.b_proj": matrix(heads, hidden),
        "self_attn.f_a_proj": matrix(head, hidden),
        "self_attn.f_b_proj": matrix(wide, head),
        "self_attn.g_a_proj": matrix(head, hidden),
        "self_attn.g_b_proj": matrix(wide, head),
        "self_attn.o_proj": matrix(hidden, wide),
        "self_attn.o_norm": torch.ones(head),
        "self_attn.A_log": torch.linspace(-3.0, 0.0, heads),
        "self_attn.dt_bias": torch.linspace(-2.0, 1.0, wide),
    }  # fmt: skip


def _latent(matrix: Callable[..., Any], heads: int, head: int, hidden: int) -> dict[str, Any]:
    """Weights of a layer with MLA. Its heads have sizes of their own."""
    import torch

    return {
        "self_attn.q_proj": matrix(heads * (NOPE + ROPE), hidden),
        "self_attn.kv_a_proj_with_mqa": matrix(RANK + ROPE, hidden),
        "self_attn.kv_a_layernorm": torch.ones(RANK),
        "self_attn.kv_b_proj": matrix(heads * 2 * NOPE, RANK),
        "self_attn.o_proj": matrix(hidden, heads * NOPE),
    }


def _config(heads: int, head: int, hidden: int, layers: int, dtype: str) -> dict[str, Any]:
    # Layers are counted from 1 here.
    return {
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
        "torch_dtype": dtype, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "head_dim": head, "kv_lora_rank": RANK, "q_lora_rank": None, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "v_head_dim": NOPE, "mla_use_nope": True, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "max_position_embeddings": 8192,
        "model_max_length": 8192, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "linear_attn_config": {
            "kda_layers": list(range(1, layers + 1, 2)),
            "full_attn_layers": list(range(2, layers + 1, 2)),
            "head_dim": head, "num_heads": heads, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
