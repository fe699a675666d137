"""Tiny targets whose own module for one token more (MTP) drafts well by construction.

The next token depends on the last one and on those 1 and 3 before it, which two attention heads
look up by distance. The module is a copy of the target's one layer, and sees the same tokens one
position earlier. So it predicts what the target will, but for the first positions of a text.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_graft.testing.models.llama import (
    TINY,
    TinyShape,
    layer_weights,
    model_config,
    random_weights,
    write_checkpoint,
    write_tokenizer,
)

ONE_LAYER = replace(TINY, num_layers=1, init_std=0.2)
"""A module is one layer, so a target of one layer is what it can predict without an error."""

EXPERTS = 4

_DISTANCES = (1, 3)
"""How far back each attention head looks, in tokens."""

SHARP = 40.0
"""Scale of the attention scores: what lies one token beside the wanted distance has no weight."""

THETA = 10000.0
FAST = 4
"""Pairs of a head's dimensions that turn so fast that they tell one distance from the next."""


def write_mimo(
    folder: Path, shape: TinyShape = ONE_LAYER, seed: int = 0, *, from_states: float = 0.0
) -> Path:
    """Write a MiMo, whose layers are Qwen2's.

    Args:
        shape: of target and module; one layer and two heads.
        from_states: weight of the target's states, which a perfect draft would not need, in the
            module's input. Above 0 the module errs, and how depends on the states.

    Returns:
        ``folder``, the target and also the draft of ``method: mtp``.
    """
    torch, randn = random_weights(seed, shape)
    target = _around_the_layer(shape, torch, randn)
    layer = _lookup_layer(shape, shape.head_dim, torch, randn)
    module = {
        **layer,
        **{f"{name}_layernorm.weight": _ones(shape, torch) for name in ("token", "hidden")},
        "final_layernorm.weight": _ones(shape, torch),
        "input_proj.weight": _joined(shape, from_states, torch, randn),
    }
    weights = target | _below("model.layers.0", layer) | _below("model.mtp_layers.0", module)
    # Transformers has no configuration of MiMo's; vLLM goes by the architecture's name.
    config = {**_config(shape, "MiMoForCausalLM"), "model_type": "qwen2"}
    write_checkpoint(folder, weights, config)
    write_tokenizer(folder, shape.vocab_size)
    return folder


def write_glm4_moe(
    folder: Path, shape: TinyShape = ONE_LAYER, seed: int = 0, *, from_states: float = 0.0
) -> Path:
    """Write a GLM-4.5: experts, and a module with a norm of its own before the output head.

    Arguments and result are those of `write_mimo`.
    """
    torch, randn = random_weights(seed, shape)
    target = _around_the_layer(shape, torch, randn)
    layer = _lookup_layer(shape, shape.head_dim // 2, torch, randn)
    dense = {name: layer.pop(name) for name in [*layer] if name.startswith("mlp.")}
    layer |= {name.replace("mlp.", "mlp.shared_experts."): each for name, each in dense.items()}
    for expert in range(EXPERTS):
        own = {name.replace("mlp.", f"mlp.experts.{expert}."): each for name, each in dense.items()}
        layer |= {name: randn(*each.shape) for name, each in own.items()}
    layer["mlp.gate.weight"] = randn(EXPERTS, shape.hidden_size)
    layer["mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    # Here the embedding comes first, and states are second.
    joined = _joined(shape, from_states, torch, randn).roll(shape.hidden_size, 1)
    module = {
        **layer,
        **{f"{name}.weight": _ones(shape, torch) for name in ("enorm", "hnorm")},
        "shared_head.norm.weight": _ones(shape, torch),
        "eh_proj.weight": joined,
    }
    weights = target | _below("model.layers.0", layer) | _below("model.layers.1", module)
    config = _config(shape, "Glm4MoeForCausalLM") | {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": shape.intermediate_size,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "partial_rotary_factor": 0.5,
    }
    config["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    write_checkpoint(folder, weights, config)
    write_tokenizer(folder, shape.vocab_size)
    return folder


def look_up(shape: TinyShape, distances: tuple[int, ...], rotary: int) -> tuple[Any, Any]:
    """Queries ``[num_heads, head_dim]`` and one key that attend to one distance each."""
    import torch

    half = rotary // 2
    angles = torch.tensor([THETA ** (-pair / half) for pair in range(FAST)])
    queries = torch.zeros(shape.num_heads, shape.head_dim)
    for head, distance in enumerate(distances):
        # Rotated to their positions, query and key differ by the angle of their distance.
        queries[head, :FAST] = torch.cos(angles * distance)
        queries[head, half : half + FAST] = -torch.sin(angles * distance)
    key = torch.zeros(shape.head_dim)
    key[:FAST] = SHARP * math.sqrt(shape.head_dim)
    return queries, key


def _ones(shape: TinyShape, torch: Any) -> Any:
    return torch.ones(shape.hidden_size)


def _around_the_layer(shape: TinyShape, torch: Any, randn: Any) -> dict[str, Any]:
    embedding = randn(shape.vocab_size, shape.hidden_size)
    return {
        # Normed as the module norms it, so that target and module read the same numbers.
        "model.embed_tokens.weight": embedding / embedding.square().mean(-1, keepdim=True).sqrt(),
        "model.norm.weight": _ones(shape, torch),
        # Scaled so that a few tokens are likely, as in a text, and not all of them alike.
        "lm_head.weight": randn(shape.vocab_size, shape.hidden_size) * 3,
    }


def _joined(shape: TinyShape, from_states: float, torch: Any, randn: Any) -> Any:
    """How states and embedding, in this order, become the module's input."""
    hidden = shape.hidden_size
    return torch.cat([randn(hidden, hidden) * from_states, torch.eye(hidden)], 1)


def _below(prefix: str, weights: dict[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{name}": weight.clone() for name, weight in weights.items()}


def _config(shape: TinyShape, architecture: str) -> dict[str, Any]:
    return {
        **model_config(shape, shape.num_layers, architecture),
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
    }


def _lookup_layer(shape: TinyShape, rotary: int, torch: Any, randn: Any) -> dict[str, Any]:
    """A layer whose heads, of which ``rotary`` dimensions turn, attend to one distance each."""
    weights = layer_weights("", shape, shape.hidden_size, torch, randn)
    weights = {name.removeprefix("."): weight for name, weight in weights.items()}
    weights["input_layernorm.weight"] = _ones(shape, torch)
    queries, key = look_up(shape, _DISTANCES, rotary)
    for name in ("q_proj", "k_proj"):
        weights[f"self_attn.{name}.weight"].zero_()
    return weights | {
        "self_attn.q_proj.bias": queries.flatten(),
        "self_attn.k_proj.bias": key.repeat(shape.num_kv_heads),
        "self_attn.v_proj.bias": torch.zeros(shape.num_kv_heads * shape.head_dim),
    }
