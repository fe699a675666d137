"""Combinations with trees that are refused in the frontend, before any GPU work, because vLLM
assumes that drafts form a chain, and we do not (yet) undo the assumption."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Find, Refusal
from vllm_graft.hooks.feature import Feature
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.refusals.draft_refusals import DRAFTS
from vllm_graft.spec_decode.refusals.engine_refusals import ENGINE
from vllm_graft.spec_decode.refusals.fit_refusals import CRASHES, DRIFTS
from vllm_graft.spec_decode.refusals.lookup_refusals import LOOKUPS
from vllm_graft.spec_decode.refusals.verification_refusals import VERIFICATION
from vllm_graft.spec_decode.targets.families import FEATURES, family_refusals, served_features


def _instead(feature: Feature) -> str:
    remedy = "serve another target"
    if feature.chain:
        remedy = f"set `{flag('tree', 'topk')}` to 1 for a chain"
    return ", or ".join([remedy, *filter(None, [feature.or_else]), f"drop `{flag('tree')}`"])


def _of_target(feature: Feature) -> Find:
    def find(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
        model = target_of(vllm_config)
        if model is None or (feature.chain and tree.topk == 1):
            return
        if says := feature.in_model(model):
            yield f"The target {says}"

    return find


def refusals() -> tuple[Refusal, ...]:
    """Every refusal, without the features of targets that some family serves."""
    served = served_features()
    targets = (
        Refusal(f"targets with {feature.name}", feature.why, _instead(feature), _of_target(feature))
        for feature in FEATURES
        if feature.name not in served
    )
    return (
        *CRASHES,
        *DRIFTS,
        *DRAFTS,
        *LOOKUPS,
        *ENGINE,
        *family_refusals(),
        *targets,
        *VERIFICATION,
    )
