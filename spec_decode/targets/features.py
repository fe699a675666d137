"""Features of target models that a family has to serve for a tree to be verified.

Each feature is looked for twice: by the frontend in the model's configuration, before anything is
loaded, and by the worker in the loaded layers, which tell more. A feature that no family serves is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import TreeConfig


def _never(_: Any) -> bool:
    return False


def _says_nothing(_: Any) -> str:
    return ""


@dataclass(frozen=True)
class Feature:
    """One feature of target models.

    Attributes:
        name: the name in tables and messages, and in a family's ``serves``.
        why: why a tree needs more than a chain does for this feature.
        in_model: takes vLLM's ``ModelConfig`` and returns what the target has, as the words after
            "The target"; empty if it lacks the feature or the configuration doesn't tell.
        in_layer: whether a loaded layer has it.
        or_else: another remedy.
        chain: whether a chain (``topk: 1``) may be drafted, which the target's own layers verify.
        asked: the key of ``graft.tree`` that decides whether there are trees on it, though a family
            serves it; else the target gets a chain. Empty if there is none.
        unasked: whether there are trees on it where that key is not given.
    """

    name: str
    why: str
    in_model: Callable[[Any], str] = _says_nothing
    in_layer: Callable[[Any], bool] = _never
    or_else: str = ""
    chain: bool = True
    asked: str = ""
    unasked: bool = False

    def is_asked(self, tree: TreeConfig) -> bool:
        """Whether trees on it need not be asked for, or are."""
        given = getattr(tree, self.asked) if self.asked else True
        return self.unasked if given is None else bool(given)


def _if(attribute: str, says: str) -> Callable[[Any], str]:
    return lambda model: says if getattr(model, attribute) else ""


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


def can_keep_inputs(model: Any) -> bool:
    """Whether a target's recurrent layers can keep inputs in place of states."""
    return is_recurrent(model) and _type_of(model) in (*_DELTA_RULE, *_KEY_DECAYS, *_MAMBA2)


def has_key_decays(model: Any) -> bool:
    """Whether a target is one of those whose layers with Kimi Delta Attention are served."""
    return is_recurrent(model) and _type_of(model) in _KEY_DECAYS


def has_mamba2(model: Any) -> bool:
    """Whether a target is one of those whose layers of Mamba-2 are served."""
    return is_recurrent(model) and _type_of(model) in _MAMBA2


def _type_of(model: Any) -> str | None:
    """The type of a model whose layers are of one kind; None if a gate makes them another."""
    text = model.hf_text_config
    delta = getattr(text, "linear_attn_config", None) or {}
    return None if delta.get("use_full_rank_gate") else getattr(text, "model_type", None)


def _of_types(types: tuple[str, ...], says: str) -> Callable[[Any], str]:
    def find(model: Any) -> str:
        has = is_recurrent(model) and _type_of(model) in types
        return says if has and _on_nvidia() else ""

    return find


_delta_rule = _of_types(_DELTA_RULE, "has recurrent layers with the gated delta rule")


def has_delta_rule(model: Any) -> bool:
    """Whether a target has layers with the gated delta rule that are served on this platform."""
    return bool(_delta_rule(model))


def not_asked_for(model: Any, tree: TreeConfig) -> Iterator[tuple[Feature, str]]:
    """The features of a model that need to be asked for and are not, each with its words."""
    for feature in FEATURES:
        if not feature.is_asked(tree) and (says := feature.in_model(model)):
            yield feature, says


def _recurrent(model: Any) -> str:
    if not is_recurrent(model):
        return ""
    if not can_keep_inputs(model):
        return "has Mamba or linear-attention layers"
    # Other platforms than CUDA have kernels and layouts of states of their own.
    return "" if _on_nvidia() else "has recurrent layers, whose trees need an NVIDIA GPU"


def _windows(model: Any) -> str:
    text = model.hf_text_config
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None) or getattr(
        text, "interleaved_sliding_window", None
    )
    # A window that no layer uses (Qwen2 lists "full_attention" only) does no harm.
    used = types is None or any("sliding" in kind for kind in types)
    return f"has sliding-window layers (window {window})" if window and used else ""


def chunks_of(model: Any) -> str:
    """What a model has of chunked attention, as the words after "The target"; empty for none."""
    text = model.hf_text_config
    types = getattr(text, "layer_types", None)
    chunk = getattr(text, "attention_chunk_size", None)
    used = types is None or any("chunked" in kind for kind in types)
    return f"has chunked-attention layers (chunk {chunk})" if chunk and used else ""


def _shared(model: Any) -> str:
    shared = getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    return "shares K/V between layers" if shared else ""


def sparse_in(model: Any) -> str:
    """What a model has of sparse attention, as the words after "The target"; empty for none."""
    text = model.hf_text_config
    # DeepSeek V3.2, GLM-5 and others have an indexer; DeepSeek V4 compresses keys besides.
    has = hasattr(text, "index_topk") or getattr(text, "compress_ratios", None)
    return "uses sparse attention, whose indexer picks the keys of a row" if has else ""


def _has_window(layer: Any) -> bool:
    # A layer with MLA keeps its window itself.
    windows = (getattr(each, "sliding_window", None) for each in (layer, layer.impl))
    return any(window not in (None, -1, (-1, -1)) for window in windows)


_STATES = "A recurrent state folds the rows in order; a node's row has to continue its parent's."
_SLOTS = "It reads a key's distance from its slot, which in a tree is not its depth."

FEATURES: tuple[Feature, ...] = (
    Feature(
        "gated delta rule",
        _STATES,
        in_model=_delta_rule,
        asked="recurrent",
        unasked=True,
    ),
    Feature(
        "Kimi delta attention",
        _STATES,
        in_model=_of_types(_KEY_DECAYS, "has recurrent layers with Kimi Delta Attention"),
        asked="recurrent",
    ),
    Feature(
        "Mamba-2",
        _STATES,
        in_model=_of_types(_MAMBA2, "has Mamba-2 layers"),
        asked="recurrent",
    ),
    Feature(
        "other Mamba or linear attention",
        "A recurrent state folds the rows in order; a tree has no single order.",
        in_model=_recurrent,
    ),
    Feature(
        "MLA attention",
        "It caches latents instead of K and V.",
        in_model=_if("use_mla", "uses MLA attention, for which there is no tree kernel"),
    ),
    Feature(
        "sparse attention",
        "An indexer picks the keys of a row in the order of their slots, other branches among "
        "them.",
        in_model=sparse_in,
        in_layer=lambda layer: bool(getattr(layer.impl, "is_sparse", False)),
    ),
    Feature(
        "an encoder and a decoder",
        "Nobody has tried cross attention with trees.",
        in_model=_if("is_encoder_decoder", "is an encoder-decoder"),
        chain=False,
    ),
    Feature(
        "ALiBi",
        _SLOTS,
        in_model=_if("uses_alibi", "uses ALiBi"),
        in_layer=lambda layer: getattr(layer.impl, "alibi_slopes", None) is not None,
    ),
    Feature(
        "sliding-window attention",
        _SLOTS,
        in_model=_windows,
        in_layer=_has_window,
        or_else="give --disable-sliding-window",
    ),
    Feature(
        "chunked attention",
        _SLOTS,
        in_model=chunks_of,
        in_layer=lambda layer: bool(getattr(layer, "attention_chunk_size", None)),
    ),
    Feature(
        "attention sinks",
        "The tree kernel leaves them out of the denominator.",
        in_layer=lambda layer: getattr(layer.impl, "sinks", None) is not None,
    ),
    Feature(
        "K/V shared with another layer",
        "Compaction moves K/V layer by layer and would move such a cache twice.",
        in_model=_shared,
        in_layer=lambda layer: getattr(layer, "kv_sharing_target_layer_name", None) is not None,
    ),
    Feature(
        "K and V heads of different sizes",
        "The tree kernel reads K and V as halves of one row.",
        # A layer with MLA has one head, whose value is a part of its key.
        in_layer=lambda layer: getattr(layer, "head_size_v", layer.head_size) != layer.head_size,
    ),
)


def unserved_in_model(model: Any, served: Collection[str]) -> Iterator[tuple[Feature, str]]:
    """The features of a model that are not served, each with the words of ``Feature.in_model``."""
    for feature in FEATURES:
        if feature.name not in served and (says := feature.in_model(model)):
            yield feature, says


def in_layer(layer: Any) -> list[str]:
    """Names of the features that a loaded layer has."""
    if not hasattr(layer, "impl"):
        return []  # A recurrent layer, whose kind its family knows.
    return [feature.name for feature in FEATURES if feature.in_layer(layer)]
