"""What trees on recurrent states cannot be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.hooks.feature import not_asked_for
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import (
    RECURRENT,
    can_keep_inputs,
    has_mamba2,
    is_recurrent,
)

_CHAIN = f"set `{flag('tree', 'topk')}` to 1 for a chain"

STATES = Refusals()


@STATES.row(
    "trees on Kimi delta attention and Mamba-2 without `recurrent: true`, and on the gated delta "
    "rule with `recurrent: false`",
    "vLLM holds memory for a state of each node of a tree and each request, so that fewer requests "
    "fit.",
    f"set `{flag('tree', 'recurrent')}` to true for trees on these, or {_CHAIN}",
)
def _not_asked(tree: TreeConfig, vllm_config: Any) -> Iterator[Found]:
    model = target_of(vllm_config)
    if tree.topk == 1 or model is None:
        return
    for feature, says in not_asked_for(RECURRENT, model, tree):
        given = "not given" if getattr(tree, feature.asked) is None else "false"
        yield Found(f"The target {says}, and {flag('tree', feature.asked)} is {given}")


@STATES.row(
    "`--use-replayssm` with trees on recurrent layers",
    "It keeps inputs of a chain, and no state per node.",
    f"drop `--use-replayssm`, or {_CHAIN}",
)
def _replay(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    given = getattr(getattr(vllm_config, "cache_config", None), "use_replayssm", False)
    model = target_of(vllm_config)
    if given and tree.topk > 1 and model is not None and is_recurrent(model):
        yield "--use-replayssm is given, and the target has recurrent layers"


@STATES.row(
    "`recurrent_form: inputs` without trees on the gated delta rule, Kimi delta attention or "
    "Mamba-2",
    "Trees on layers of these kinds alone can keep inputs.",
    f"set `{flag('tree', 'recurrent_form')}` to 'auto'",
)
def _kept_inputs(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    model = target_of(vllm_config)
    if tree.recurrent_form != "inputs" or model is None:
        return
    if tree.topk == 1 or not can_keep_inputs(model):
        yield f"{flag('tree', 'recurrent_form')} is 'inputs', and there are no such trees"


@STATES.row(
    "`shape: auto` with trees on Mamba-2",
    "vLLM captures graphs of these layers for one number of drafts.",
    f"set `{flag('tree', 'shape')}` to 'fixed'",
)
def auto_widths(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Find trees of changing size on Mamba-2."""
    model = target_of(vllm_config)
    if tree.shape == "auto" and tree.topk > 1 and model is not None and has_mamba2(model):
        yield f"{flag('tree', 'shape')} is 'auto', and the target has Mamba-2 layers"
