"""Targets with recurrent layers, before they are loaded: kinds, refusals, and memory of states."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm_graft.base.options import flag, target_of
from vllm_graft.base.refusal import Found, Refusals
from vllm_graft.base.values import human
from vllm_graft.hooks.feature import Feature, not_asked_for
from vllm_graft.spec_decode.config.tree_config import TreeConfig

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


MOST, FEW = 15, 7
SHARE = 4
"""States of a tree may take one part in so many of a GPU's memory, beside weights and K/V."""


class StateRoom(NamedTuple):
    """The room that a device has for recurrent states.

    Attributes:
        nodes: most nodes of a preset's tree.
        says: why it has so many, or why there is no room.
        fits: whether states of so many nodes have room.
        requests: the most requests for whose states there is room.
    """

    nodes: int
    says: str
    fits: bool = True
    requests: int = 0


def node_bytes(nodes: int, vllm_config: Any) -> int:
    """Bytes that vLLM holds on one rank for one row of one request with the gated delta rule. A
    row's window of inputs has room for all `nodes` of a tree."""
    from vllm.model_executor.layers.mamba.mamba_utils import (
        MambaStateDtypeCalculator,
        MambaStateShapeCalculator,
    )

    model, cache = target_of(vllm_config), vllm_config.cache_config
    text, ranks = model.hf_text_config, vllm_config.parallel_config.tensor_parallel_size
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1, text.linear_num_key_heads, text.linear_num_value_heads, text.linear_key_head_dim,
        text.linear_value_head_dim, text.linear_conv_kernel_dim, nodes,
    )  # fmt: skip
    dtypes = MambaStateDtypeCalculator.gated_delta_net_state_dtype(
        model.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )
    layer = sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes))
    return int(list(text.layer_types).count("linear_attention") * layer) // int(ranks)


def state_room(vllm_config: Any) -> StateRoom:
    """How many nodes a preset's tree gets at most, for a target as of `node_bytes`."""
    from vllm.platforms import current_platform

    requests = vllm_config.scheduler_config.max_num_seqs
    memory = current_platform.get_device_total_memory()
    each = node_bytes(MOST, vllm_config)
    why = f"vLLM holds {human(each)} of recurrent states per node and request."

    def too_much(nodes: int) -> str:
        room, of_request = memory // SHARE, (1 + nodes) * each
        if of_request * requests <= room:
            return ""
        return (
            f"{why} With {nodes} nodes and --max-num-seqs {requests} that is "
            f"{human(of_request * requests)}, more than a quarter of the device's "
            f"{human(memory)}: --max-num-seqs {room // of_request} has room for them."
        )

    if not (crowded := too_much(MOST)):
        return StateRoom(MOST, why)
    if none := too_much(FEW):
        most = memory // SHARE // ((1 + FEW) * each)
        return StateRoom(FEW, none, fits=False, requests=most)
    return StateRoom(FEW, crowded)


def kept_bytes(rows: int, model: Any, window: Sequence[int], state: Sequence[int]) -> int:
    """Bytes of what one layer keeps of so many rows in place of states. `window` is the shape of a
    request's inputs, features first or last, `state` that of its state, heads first, keys last."""
    import torch

    from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
        Decay,
        LayerInputs,
        numbers_of,
    )

    by_key = Decay.BY_KEY if _is_of(model, _KEY_DECAYS) else Decay.SCALAR
    decay = Decay.SELECTIVE if has_mamba2(model) else by_key
    gates = numbers_of(decay, state[-1]), state[0]
    # Features are more than a window's inputs.
    return LayerInputs.allocate(rows, max(window), gates, model.dtype, torch.device("meta")).nbytes
