"""Which targets have recurrent layers, and of which kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_graft.hooks.feature import Feature

_DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Types of models whose recurrent layers are all vLLM's ``QwenGatedDeltaNetAttention``."""

_KEY_DECAYS = ("kimi_linear",)
"""Types of models whose recurrent layers are all vLLM's ``KimiGatedDeltaNetAttention``, but for
those whose gates have a full rank (Kimi K3)."""

_MAMBA2 = ("nemotron_h", "falcon_h1", "granitemoehybrid")
"""Types of models whose recurrent layers are all vLLM's ``MambaMixer2``."""


def _on_nvidia() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def is_recurrent(model: Any) -> bool:
    """Whether a target has layers that keep a state in place of K/V."""
    return bool(model.is_hybrid or model.is_attention_free)


def _is_of(model: Any, types: tuple[str, ...]) -> bool:
    text = model.hf_text_config
    # With such a gate a model's layers are of another kind.
    gate = (getattr(text, "linear_attn_config", None) or {}).get("use_full_rank_gate")
    return is_recurrent(model) and not gate and getattr(text, "model_type", None) in types


def can_keep_inputs(model: Any) -> bool:
    """Whether a target's recurrent layers can keep inputs in place of states."""
    return _is_of(model, (*_DELTA_RULE, *_KEY_DECAYS, *_MAMBA2))


def has_key_decays(model: Any) -> bool:
    """Whether a target is one of those whose layers with Kimi Delta Attention are served."""
    return _is_of(model, _KEY_DECAYS)


def has_mamba2(model: Any) -> bool:
    """Whether a target is one of those whose layers of Mamba-2 are served."""
    return _is_of(model, _MAMBA2)


def has_delta_rule(model: Any) -> bool:
    """Whether a target has layers with the gated delta rule that are served on this platform."""
    return _is_of(model, _DELTA_RULE) and _on_nvidia()


def _if_of(types: tuple[str, ...], says: str) -> Callable[[Any], str]:
    return lambda model: says if _is_of(model, types) and _on_nvidia() else ""


def _recurrent(model: Any) -> str:
    if not is_recurrent(model):
        return ""
    if not can_keep_inputs(model):
        return "has Mamba or linear-attention layers"
    # Other platforms than CUDA have kernels and layouts of states of their own.
    return "" if _on_nvidia() else "has recurrent layers, whose trees need an NVIDIA GPU"


_STATES = "A recurrent state folds the rows in order; a node's row has to continue its parent's."

RECURRENT: tuple[Feature, ...] = (
    Feature(
        "gated delta rule",
        _STATES,
        in_model=_if_of(_DELTA_RULE, "has recurrent layers with the gated delta rule"),
        asked="recurrent",
        unasked=True,
    ),
    Feature(
        "Kimi delta attention",
        _STATES,
        in_model=_if_of(_KEY_DECAYS, "has recurrent layers with Kimi Delta Attention"),
        asked="recurrent",
    ),
    Feature("Mamba-2", _STATES, in_model=_if_of(_MAMBA2, "has Mamba-2 layers"), asked="recurrent"),
    Feature(
        "other Mamba or linear attention",
        "A recurrent state folds the rows in order; a tree has no single order.",
        in_model=_recurrent,
    ),
)
