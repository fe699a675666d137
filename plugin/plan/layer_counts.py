"""How many layers of a model keep K/V, and how many keep a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_ATTENTION = ("attention", "full_attention", "sliding_attention", "hybrid")
_RECURRENT = ("linear_attention", "mamba", "hybrid")
"""Names of layers, which change with the version of transformers. A hybrid layer has both."""


class LayerCounts(NamedTuple):
    """Layers of one pipeline rank.

    Attributes:
        attention: layers with K/V.
        recurrent: layers with a recurrent state.
    """

    attention: int
    recurrent: int

    @classmethod
    def of(cls, model: Any, parallel: Any) -> LayerCounts:
        """Count them by what the configuration calls them.

        Args:
            model: vLLM's ``ModelConfig``.
            parallel: vLLM's ``ParallelConfig``.

        Raises:
            ValueError: if the configuration of a hybrid doesn't say it.
        """
        start, end = model.get_layers_start_end_indices(parallel)
        if not model.is_hybrid:
            layers = model.get_num_layers_by_block_type(parallel, "attention")
            return cls(layers, end - start if model.is_attention_free else 0)
        kinds = _kinds_of(model)[start:end]
        if not kinds:
            # Of another family: vLLM may know how many there are.
            layers = model.get_num_layers_by_block_type(parallel, "attention")
            return cls(layers, end - start - layers)
        return cls(
            sum(kind in _ATTENTION for kind in kinds), sum(kind in _RECURRENT for kind in kinds)
        )


def _kinds_of(model: Any) -> Sequence[str]:
    """What each layer of a hybrid is called; nothing if it is not told."""
    text = model.hf_text_config
    delta = getattr(text, "linear_attn_config", None) or {}
    if "kda_layers" in delta:
        # Kimi Linear counts layers from 1.
        own = set(delta["kda_layers"])
        count = text.num_hidden_layers
        return [
            "linear_attention" if place + 1 in own else "full_attention" for place in range(count)
        ]
    return getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or []
