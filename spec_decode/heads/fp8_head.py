"""An output head in FP8: a draft's levels read half of the bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.base.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

FLAG = "--additional-config.graft.eagle.head_dtype"

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
# Of rows of zeros: any, for which 0 / 0 is not asked.
_SMALLEST_SCALE = 1e-30
# Numbers that are quantised at a time: 256 MB of them in float32.
_CHUNK = 1 << 26


class Fp8Head:
    """The rows of a draft's output head as e4m3 numbers, with a scale each.

    States are quantised with a scale a row when they come, so that the product is one of FP8's
    (vLLM's CUTLASS kernel: at 8 rows 42 us for 32,000 x 4,096, where bf16 takes 66 on an H200).
    Drafts come from it and nothing that is emitted: the head of the target is another one, or, if
    both share it, stays as it is.

    It stands in for ``lm_head`` where vLLM's logits processor is called, which gathers the shards
    of tensor parallelism and cuts what pads the vocabulary.

    Args:
        weight: ``[rows, hidden]``, bf16 or f16 (f32 without CUDA); is not kept.
        tp_size: ranks of tensor parallelism that hold a part of the rows each.

    Attributes:
        weight: e4m3 ``[rows, hidden]``.
        scale: f32 ``[rows, 1]``.
        tp_size: as given.

    Raises:
        ConfigError: the device has no product of FP8 numbers.
    """

    def __init__(self, weight: torch.Tensor, tp_size: int = 1) -> None:
        self.tp_size = tp_size
        self._multiply = _product(weight.device)
        rows = max(1, _CHUNK // weight.shape[1])
        parts = [quantize(part) for part in weight.detach().split(rows)]
        self.weight = torch.cat([numbers for numbers, _ in parts])
        self.scale = torch.cat([scale for _, scale in parts])

    @property
    def quant_method(self) -> Fp8Head:
        """What the logits processor asks for the product: itself."""
        return self

    @property
    def num_bytes(self) -> int:
        """Of the rows and their scales."""
        return int(self.weight.nbytes + self.scale.nbytes)

    def apply(
        self, layer: object, hidden: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As vLLM's quantisation methods have it: `layer` is this head.

        Args:
            layer: not used.
            hidden: ``[num_rows, hidden]``.
            bias: ``[rows]``, added to the logits.

        Returns:
            Logits ``[num_rows, rows]`` of the dtype of `hidden`.
        """
        logits = self._multiply(hidden, self.weight, self.scale)
        return logits if bias is None else logits + bias


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows` ``[count, width]`` as e4m3 numbers, and f32 ``[count, 1]`` to multiply by."""
    largest = rows.abs().amax(1, keepdim=True).float()
    scale = (largest / _LARGEST).clamp_(min=_SMALLEST_SCALE)
    return (rows.float() / scale).clamp_(-_LARGEST, _LARGEST).to(FP8), scale


def _product(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]:
    """What multiplies states by quantised rows on a device."""
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
    return ops.cutlass_scaled_mm(numbers, weight.t(), scales, scale, hidden.dtype)


def _emulated(hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    numbers, scales = quantize(hidden)
    return ((numbers.float() @ weight.float().t()) * scales * scale.t()).to(hidden.dtype)
