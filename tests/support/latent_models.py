"""Tiny models with multi-head latent attention (MLA), whose latents have their true size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_graft.testing import TinyShape

VOCABULARY = 512


def write_deepseek(folder: Path, *, heads: int, hidden: int = 64, layers: int = 4) -> Path:
    """Write a random DeepSeek V2 whose layers are dense.

    Each token of a greedy continuation depends on the tokens before it: attention has as much
    weight as the residual stream.
    """
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "moe_intermediate_size": hidden,
        "num_hidden_layers": layers, "first_k_dense_replace": layers, "n_routed_experts": 4,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "initializer_range": 1.2 * hidden**-0.5,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
        # As in the published models. Without it vLLM 0.32 rotates wrongly on a CPU: its kernel
        # takes queries of several heads for one head, and ignores a key's strides.
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 1024,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def draft_shape(hidden: int = 64, layers: int = 4) -> TinyShape:
    """The shape of an EAGLE-3 head for the target."""
    return TinyShape(vocab_size=VOCABULARY, hidden_size=hidden, num_layers=layers)
