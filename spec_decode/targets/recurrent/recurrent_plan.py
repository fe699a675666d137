"""How much memory trees on recurrent layers take, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_graft.spec_decode.targets.recurrent.kernels.gates import Decay, numbers_of
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import LayerInputs
from vllm_graft.spec_decode.targets.recurrent.recurrent_features import has_key_decays, has_mamba2


def kept_bytes(rows: int, model: Any, window: Sequence[int], state: Sequence[int]) -> int:
    """Bytes of what one layer keeps of so many rows in place of states.

    Args:
        rows: of trees.
        model: vLLM's ``ModelConfig`` of the target.
        window: shape of a request's window of inputs, features first or last.
        state: shape of a request's state, heads first and keys last.
    """
    by_key = Decay.BY_KEY if has_key_decays(model) else Decay.SCALAR
    decay = Decay.SELECTIVE if has_mamba2(model) else by_key
    gates = numbers_of(decay, state[-1]), state[0]
    # Features are more than a window's inputs.
    return LayerInputs.allocate(rows, max(window), gates, model.dtype, torch.device("meta")).nbytes
