"""What trees on recurrent states cannot be combined with, refused in the frontend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Refusal
from vllm_graft.hooks.feature import not_asked_for
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import (
    RECURRENT,
    can_keep_inputs,
    has_mamba2,
    is_recurrent,
)


def not_asked(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """Trees on some recurrent layers are asked for by name, and those on others can be left out."""
    model = target_of(vllm_config)
    if tree.topk == 1 or model is None:
        return
    for feature, says in not_asked_for(RECURRENT, model, tree):
        key, given = flag("tree", feature.asked), getattr(tree, feature.asked)
        yield (
            f"The target {says}, and {key} is {'not given' if given is None else 'false'}. vLLM "
            "holds memory for a state of each node of a tree and each request, so that fewer "
            f"requests fit: set {key} to true for trees on these, or {flag('tree', 'topk')} to 1 "
            "for a chain."
        )


def replay(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """ReplaySSM keeps inputs of a chain in place of a state per row."""
    given = getattr(getattr(vllm_config, "cache_config", None), "use_replayssm", False)
    model = target_of(vllm_config)
    if given and tree.topk > 1 and model is not None and is_recurrent(model):
        yield (
            f"--use-replayssm keeps no state per node: drop it, or set {flag('tree', 'topk')} to 1 "
            "for a chain."
        )


def kept_inputs(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """A form that no layer of the target would take."""
    model = target_of(vllm_config)
    if tree.recurrent_form != "inputs" or model is None:
        return
    if tree.topk == 1 or not can_keep_inputs(model):
        yield (
            f"{flag('tree', 'recurrent_form')} is 'inputs', which only trees on the gated delta "
            "rule, Kimi delta attention and Mamba-2 can do: set it to 'auto'."
        )


def auto_widths(tree: TreeConfig, vllm_config: Any) -> Iterator[str]:
    """VLLM captures Mamba-2 for the full number of drafts alone."""
    model = target_of(vllm_config)
    if tree.shape == "auto" and tree.topk > 1 and model is not None and has_mamba2(model):
        yield (
            f"{flag('tree', 'shape')} is 'auto', but vLLM's graphs of Mamba-2 layers are for one "
            "number of drafts: set the shape to 'fixed'."
        )


STATES: tuple[Refusal, ...] = (
    Refusal(
        "trees on Kimi delta attention and Mamba-2 without `recurrent: true`, and on the gated "
        "delta rule with `recurrent: false`",
        "vLLM holds memory for a state of each node and request, as for each draft of a chain, so "
        "that fewer requests fit. A step moves a request's state three times, whatever its nodes; "
        "with `recurrent_form: states` it writes one per node.",
        "set the key to `true`, or `topk` to 1",
        not_asked,
    ),
    Refusal(
        "`--use-replayssm` with trees on recurrent layers",
        "It keeps inputs of a chain in place of a state per node.",
        "drop it, or set `topk` to 1",
        replay,
    ),
    Refusal(
        "`recurrent_form: inputs` without trees on the gated delta rule, Kimi delta attention or "
        "Mamba-2",
        "No layer would keep inputs.",
        "set `recurrent_form: auto`",
        kept_inputs,
    ),
    Refusal(
        "`shape: auto` with trees on Mamba-2",
        "vLLM captures these layers for one number of drafts.",
        "set `shape: fixed`",
        auto_widths,
    ),
)
