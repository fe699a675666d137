"""Tiny models with multi-head latent attention (MLA), whose latents have their true size."""

from pathlib import Path
from typing import Any

from tests.support.models.random_models import VOCABULARY, write_random
from vllm_graft.testing import TinyShape

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
"""Rotations as in the published models. Without YaRN vLLM 0.32 rotates wrongly on a CPU: its kernel
takes queries of several heads for one head, and ignores a key's strides."""


def write_deepseek(
    folder: Path, *, heads: int, hidden: int = 64, layers: int = 4, **others: Any
) -> Path:
    """Write a random DeepSeek V2 whose layers are dense.

    Each token of a greedy continuation depends on the tokens before it: attention has as much
    weight as the residual stream.
    """
    sizes: dict[str, Any] = {
        "hidden_size": hidden, "intermediate_size": 2 * hidden, "moe_intermediate_size": hidden,
        "num_hidden_layers": layers, "first_k_dense_replace": layers, "n_routed_experts": 4,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "initializer_range": 1.2 * hidden**-0.5,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
        "rope_parameters": YARN,
    }  # fmt: skip
    return write_random(folder, "DeepseekV2ForCausalLM", **sizes | others)


def draft_shape(hidden: int = 64, layers: int = 4) -> TinyShape:
    """The shape of an EAGLE-3 head for the target."""
    return TinyShape(vocab_size=VOCABULARY, hidden_size=hidden, num_layers=layers)


HEADS, HIDDEN, QUERY, RANK, ROPE, NOPE = 2, 64, 32, 512, 64, 128
"""Sizes of the targets below and of their drafts; those of latents are true."""

FROM_STATES = 0.07
"""Weight of the target's states in a draft's input, which a perfect draft would not need."""


def write_target(folder: Path, heads: int = HEADS) -> Path:
    """Write a DeepSeek V3 of one dense layer, and a module for one token more (MTP).

    The module is a copy of the layer. It sees the same tokens one position earlier, all but the
    first, which rotations do not notice. So it mostly predicts what the target will, by means of
    its own keys; it errs where the first token counts, and by the states of the target that are
    mixed into its input.
    """
    from vllm_graft.testing.models.llama import write_checkpoint, write_tokenizer

    weights, layer = _around(), _layer(heads)
    module = {
        **layer,
        **{f"{name}.weight": _ones() for name in ("enorm", "hnorm", "shared_head.norm")},
        "eh_proj.weight": _joined(seed=3),
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
        "shared_head.head.weight": weights["lm_head.weight"],
    }
    for place, each in enumerate((layer, module)):
        weights |= {f"model.layers.{place}.{name}": tensor for name, tensor in each.items()}
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    write_checkpoint(folder, weights, _config("deepseek_v3", "DeepseekV3ForCausalLM", heads))
    write_tokenizer(folder, VOCABULARY)
    return folder


def write_latent_eagle(folder: Path) -> Path:
    """Write an EAGLE-1 head for `write_target`: a copy of its layer, like the module."""
    from vllm_graft.testing.models.llama import write_checkpoint

    around = _around()
    weights = {
        **{f"layers.0.{name}": tensor for name, tensor in _layer().items()},
        **{f"{name}.weight": _ones() for name in ("enorm", "hnorm", "norm")},
        "fc.weight": _joined(seed=4),
        "embed_tokens.weight": around["model.embed_tokens.weight"],
    }
    write_checkpoint(folder, weights, _config("deepseek_v3", "DeepseekV3ForCausalLM"))
    return folder


def write_latent_eagle3(folder: Path, heads: int = HEADS) -> Path:
    """Write an EAGLE-3 head for `write_target`, whose attention reads embeddings as the target's.

    It has no embedding in its residual stream, and a little of the target's states in place of it.
    """
    import torch

    from vllm_graft.testing.models.llama import write_checkpoint

    layer = _layer(heads)
    for name in ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"):
        # It reads the embedding and, behind that, the states.
        of_states = _randn(*layer[name].shape, seed=6) * FROM_STATES
        layer[name] = torch.cat([layer[name], of_states], 1)
    weights = {
        **{f"midlayer.{name}": tensor for name, tensor in layer.items()},
        **{f"{name}.weight": _ones() for name in ("midlayer.hidden_norm", "norm")},
        "fc.weight": _randn(HIDDEN, HIDDEN, seed=7) * FROM_STATES,
        "lm_head.weight": _around()["lm_head.weight"],
    }
    # Of DeepSeek V3 vLLM takes any draft for its module.
    config = _config("deepseek_v2", "Eagle3DeepseekV2ForCausalLM", heads) | {
        "draft_vocab_size": VOCABULARY,
        "num_aux_hidden_states": 1,
        "eagle_aux_hidden_state_layer_ids": [1],
    }
    write_checkpoint(folder, weights, config)
    return folder


def _randn(*size: int, seed: int) -> Any:
    """Normal numbers by which a product of `HIDDEN` terms gets 1.2 times as large."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator) * 1.2 * HIDDEN**-0.5


def _ones() -> Any:
    import torch

    return torch.ones(HIDDEN)


def _around() -> dict[str, Any]:
    embedding = _randn(VOCABULARY, HIDDEN, seed=1)
    return {
        # Normed as drafts norm it, so that target and draft read the same numbers.
        "model.embed_tokens.weight": embedding / embedding.square().mean(-1, keepdim=True).sqrt(),
        "model.norm.weight": _ones(),
        "lm_head.weight": _randn(VOCABULARY, HIDDEN, seed=2),
    }


def _joined(seed: int) -> Any:
    """How embedding and states, in this order, become a draft's input."""
    import torch

    return torch.cat([torch.eye(HIDDEN), _randn(HIDDEN, HIDDEN, seed=seed) * FROM_STATES], 1)


def _layer(heads: int = HEADS) -> dict[str, Any]:
    import torch

    shapes = {
        "self_attn.q_a_proj": (QUERY, HIDDEN),
        "self_attn.q_b_proj": (heads * (NOPE + ROPE), QUERY),
        "self_attn.kv_a_proj_with_mqa": (RANK + ROPE, HIDDEN),
        "self_attn.kv_b_proj": (heads * 2 * NOPE, RANK),
        "self_attn.o_proj": (HIDDEN, heads * NOPE),
        "mlp.gate_proj": (2 * HIDDEN, HIDDEN),
        "mlp.up_proj": (2 * HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, 2 * HIDDEN),
    }
    weights = {
        f"{name}.weight": _randn(*shape, seed=10 + number)
        for number, (name, shape) in enumerate(shapes.items())
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = _ones()
    for name, size in (("q_a_layernorm", QUERY), ("kv_a_layernorm", RANK)):
        weights[f"self_attn.{name}.weight"] = torch.ones(size)
    return weights


def _config(model_type: str, architecture: str, heads: int = HEADS) -> dict[str, Any]:
    return {
        "architectures": [architecture], "model_type": model_type, "torch_dtype": "float32",
        "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "moe_intermediate_size": HIDDEN,
        "num_hidden_layers": 1, "num_nextn_predict_layers": 1,
        # All layers are dense, the draft's too.
        "first_k_dense_replace": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "n_shared_experts": 1,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": QUERY,
        "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE,
        "v_head_dim": NOPE, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
        "rope_parameters": YARN,
    }  # fmt: skip
