"""Whether target or draft is a mixture of experts, each of whose rows reads weights of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.base.options import target_of
from vllm_graft.spec_decode.models.chosen import has_model, is_block

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import TreeConfig

DENSE_DRAFTS = frozenset(
    {
        "EagleLlama4ForCausalLM",
        "ErnieMTPModel",
        "LongCatFlashMTPModel",
        "MiMoV2MTPModel",
        "MiMoV2OmniMTPModel",
        "Step3p5MTP",
    }
)
"""Architectures of drafts without experts, although their configurations, often the target's, count
some."""


def draft_has_experts(config: TreeConfig, speculative: Any) -> bool:
    """Whether rows of a level read experts of the draft's.

    An MTP module says so in the target's own configuration. EAGLE-3 heads are dense whatever they
    were made for. Block drafters have no levels, and n-grams no draft model.
    """
    if speculative.method == "eagle3" or not has_model(config, speculative):
        return False
    draft = getattr(speculative, "draft_model_config", None)
    dense = DENSE_DRAFTS.intersection(getattr(draft, "architectures", None) or ())
    return _is_mixture(draft) and not dense and not is_block(config, speculative)


def step_has_experts(config: TreeConfig, vllm_config: Any) -> bool:
    """Whether rows of a step read experts, the target's or the draft's."""
    speculative = vllm_config.speculative_config
    return _is_mixture(target_of(vllm_config)) or draft_has_experts(config, speculative)


def _is_mixture(model: Any) -> bool:
    return bool(getattr(model, "is_moe", False))
