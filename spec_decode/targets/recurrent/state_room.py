"""Memory of trees on recurrent layers, and how many nodes a preset lets vLLM hold states for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_graft.base.options import target_of
from vllm_graft.base.values import human
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import has_key_decays, has_mamba2

MOST, FEW = 15, 7
SHARE = 4
"""States of a tree may take one part in so many of a GPU's memory. The weights and the K/V of the
same requests need the rest."""


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
    """Bytes that vLLM holds on one rank for one row of one request with the gated delta rule.

    A row's window of inputs has room for all `nodes` of a tree.
    """
    from vllm.model_executor.layers.mamba.mamba_utils import (
        MambaStateDtypeCalculator,
        MambaStateShapeCalculator,
    )

    model, cache = target_of(vllm_config), vllm_config.cache_config
    text, ranks = model.hf_text_config, vllm_config.parallel_config.tensor_parallel_size
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        1,
        text.linear_num_key_heads,
        text.linear_num_value_heads,
        text.linear_key_head_dim,
        text.linear_value_head_dim,
        text.linear_conv_kernel_dim,
        nodes,
    )
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
    """Bytes of what one layer keeps of so many rows in place of states.

    `window` is the shape of a request's window of inputs, features first or last, `state` that of
    its state, heads first and keys last.
    """
    import torch

    from vllm_graft.spec_decode.targets.recurrent.kernels.gates import Decay, numbers_of
    from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import LayerInputs

    by_key = Decay.BY_KEY if has_key_decays(model) else Decay.SCALAR
    decay = Decay.SELECTIVE if has_mamba2(model) else by_key
    gates = numbers_of(decay, state[-1]), state[0]
    # Features are more than a window's inputs.
    return LayerInputs.allocate(rows, max(window), gates, model.dtype, torch.device("meta")).nbytes
