"""FP8 in a draft: its output head, of which levels read half as many bytes, and its `fc`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

FLAG = "--additional-config.graft.tree.head_dtype"

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# The scale of an all-zero row: any positive number, so that 0 / 0 does not arise.
_SMALLEST_SCALE = 1e-30
# Elements that are quantised at a time, which take 256 MB in float32.
_CHUNK = 1 << 26


class Fp8Head:
    """The rows of a draft's output head as e4m3 numbers, with one scale per row.

    Incoming states are quantised, too, with one scale per row, so that the product is an FP8 one
    (vLLM's CUTLASS kernel). It is passed for ``lm_head`` to vLLM's logits processor. A device
    without such a product is refused.

    Attributes:
        weight: e4m3 ``[rows, hidden]``, of bf16 or f16 (f32 without CUDA).
        scale: f32 ``[rows, 1]``.
    """

    def __init__(self, weight: torch.Tensor, tp_size: int = 1) -> None:
        self.tp_size = tp_size
        self._multiply = _product(weight.device)
        self.weight = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        self.scale = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
        self.renew(weight)

    def renew(self, weight: torch.Tensor) -> None:
        """Quantize other rows ``[rows, hidden]`` in place: CUDA graphs hold the addresses."""
        rows = max(1, _CHUNK // weight.shape[1])
        parts = (each.split(rows) for each in (weight.detach(), self.weight, self.scale))
        for part, numbers, scale in zip(*parts, strict=True):
            found, scales = quantize(part)
            numbers.copy_(found)
            scale.copy_(scales)

    def empty(self, size: int) -> Fp8Head:
        """A head of `size` rows of the same length, all on each rank, whose numbers are not set."""
        made = copy.copy(self)
        made.tp_size = 1
        made.weight = self.weight.new_empty(size, self.weight.shape[1])
        made.scale = self.scale.new_empty(size, 1)
        return made

    @property
    def quant_method(self) -> Fp8Head:
        """The object that the logits processor asks for the product: this head itself."""
        return self

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes + self.scale.nbytes)

    def apply(
        self, layer: object, hidden: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute logits ``[num_rows, rows]``, with the signature of vLLM's ``QuantizeMethod``."""
        logits = self._multiply(hidden, self.weight, self.scale)
        return logits if bias is None else logits + bias


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows` ``[count, width]`` as e4m3 numbers, and the rows' f32 scales ``[count, 1]``."""
    largest = rows.abs().amax(1, keepdim=True).float()
    scale = (largest / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    return (rows.float() / scale).clamp_(-_LARGEST, _LARGEST).to(FP8), scale


def _product(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    if device.type != "cuda":
        return _emulated
    from vllm.model_executor.layers.quantization.utils.w8a8_utils import cutlass_fp8_supported

    if not cutlass_fp8_supported():
        raise ConfigError(
            f"{FLAG} is 'fp8', but {torch.cuda.get_device_name(device)} has no product of FP8 "
            "numbers (compute capability 8.9 or later has): remove the flag"
        )
    return _by_cutlass


def _by_cutlass(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from vllm import _custom_ops as ops

    numbers, scales = ops.scaled_fp8_quant(hidden, use_per_token_if_dynamic=True)
    # The product writes 16 bits only; a draft's scores of states in float32 need no more.
    dtype = torch.bfloat16 if hidden.dtype == torch.float32 else hidden.dtype
    return ops.cutlass_scaled_mm(numbers, weight.t(), scales, scale, dtype).to(hidden.dtype)


def _emulated(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    numbers, scales = quantize(hidden)
    return ((numbers.float() @ weight.float().t()) * scales * scale.t()).to(hidden.dtype)


def quantize_by_kernel(draft: Any) -> bool:
    """Let a quantised `fc` quantise its input by vLLM's kernel; return whether there was one.

    Outside of a compiled model vLLM compiles the torch form of its quantisation (`QuantFP8`)
    separately, whose guards cost the host time in every step. The kernel computes the same, with
    one scale per row.
    """
    fc = getattr(getattr(draft, "model", None), "fc", None)
    kernel = getattr(getattr(fc, "quant_method", None), "fp8_linear", None)
    quantization = getattr(kernel, "quant_fp8", None)
    if quantization is None:
        return False
    quantization._forward_method = quantization.forward_cuda
    return True
