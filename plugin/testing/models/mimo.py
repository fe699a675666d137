"""A tiny MiMo, whose module for one token more (MTP) drafts well by construction."""

from __future__ import annotations

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

MIMO = replace(TINY, num_layers=1, init_std=0.2)
"""A module is one layer, so a target of one layer is what it can predict without an error."""

_DISTANCES = (1, 3)
"""How far back each attention head of the target looks, in tokens."""

_SHARP = 40.0
"""Scale of the attention scores: what lies one token beside the wanted distance has no weight."""

_THETA = 10000.0
_FAST = 4
"""Pairs of a head's dimensions that turn so fast that they tell one distance from the next."""


def write_mimo(
    folder: Path, shape: TinyShape = MIMO, seed: int = 0, *, from_states: float = 0.0
) -> Path:
    """Write a MiMo whose module drafts well by construction, without training.

    The target's next token depends on the last token and on those 1 and 3 before it, which its two
    attention heads look up by their distance. The module is the target's own layer. It sees the
    same tokens one position earlier, which rotary embeddings do not notice, so that it predicts
    what the target will. Only the first few positions of a text differ, as the module never sees
    the first token.

    Args:
        folder: written.
        shape: sizes of target and module; one layer and two heads.
        seed: of the weights.
        from_states: weight with which the target's states, which a perfect draft would not need,
            are mixed into the module's input. Above 0 the module errs, and how it errs depends on
            the states.

    Returns:
        ``folder``, which serves as the target and as the draft of ``method: mtp``.
    """
    torch, randn = random_weights(seed, shape)
    vocab, hidden = shape.vocab_size, shape.hidden_size
    embedding = randn(vocab, hidden)
    # Normed as the module norms them, so that both layers read the same numbers.
    embedding /= embedding.square().mean(-1, keepdim=True).sqrt()
    layer = _lookup_layer(shape, torch, randn)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        # Scaled so that a few tokens are likely, as in a text, and not all of them alike.
        "lm_head.weight": randn(vocab, hidden) * 3,
    }
    for prefix in ("model.layers.0", "model.mtp_layers.0"):
        weights |= {f"{prefix}.{name}": weight.clone() for name, weight in layer.items()}
    states = randn(hidden, hidden) * from_states
    module = "model.mtp_layers.0"
    weights[f"{module}.input_proj.weight"] = torch.cat([states, torch.eye(hidden)], 1)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{module}.{norm}.weight"] = torch.ones(hidden)
    # Transformers has no configuration of MiMo's; vLLM goes by the architecture's name.
    config = {
        **model_config(shape, shape.num_layers, "MiMoForCausalLM"),
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_theta": _THETA, "rope_type": "default"},
    }
    write_checkpoint(folder, weights, config)
    write_tokenizer(folder, vocab)
    return folder


def _lookup_layer(shape: TinyShape, torch: Any, randn: Any) -> dict[str, Any]:
    """A layer of Qwen2's whose heads attend to the token at a fixed distance each."""
    weights = layer_weights("", shape, shape.hidden_size, torch, randn)
    weights = {name.removeprefix("."): weight for name, weight in weights.items()}
    weights["input_layernorm.weight"] = torch.ones(shape.hidden_size)
    half, keys = shape.head_dim // 2, shape.num_kv_heads * shape.head_dim
    angles = torch.tensor([_THETA ** (-pair / half) for pair in range(_FAST)])
    queries = torch.zeros(shape.num_heads, shape.head_dim)
    for head, distance in enumerate(_DISTANCES):
        # Rotated to their positions, query and key differ by the angle of their distance.
        queries[head, :_FAST] = torch.cos(angles * distance)
        queries[head, half : half + _FAST] = -torch.sin(angles * distance)
    key = torch.zeros(shape.num_kv_heads, shape.head_dim)
    key[:, :_FAST] = _SHARP * math.sqrt(shape.head_dim)
    for name in ("q_proj", "k_proj"):
        weights[f"self_attn.{name}.weight"].zero_()
    return weights | {
        "self_attn.q_proj.bias": queries.flatten(),
        "self_attn.k_proj.bias": key.flatten(),
        "self_attn.v_proj.bias": torch.zeros(keys),
    }
