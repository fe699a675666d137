"""FP8 in a draft: its output head, of which levels read half as many bytes, and its `fc`."""

import copy
from collections.abc import Callable
from typing import Any, Self

import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.seams.ranks import gather_rows

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

    def empty(self, size: int) -> Self:
        """A head of `size` rows of the same length, all on each rank, whose numbers are not set."""
        made = copy.copy(self)
        made.tp_size = 1
        made.weight = self.weight.new_empty(size, self.weight.shape[1])
        made.scale = self.scale.new_empty(size, 1)
        return made

    @property
    def quant_method(self) -> Self:
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
    one scale per row."""
    fc = getattr(getattr(draft, "model", None), "fc", None)
    kernel = getattr(getattr(fc, "quant_method", None), "fp8_linear", None)
    quantization = getattr(kernel, "quant_fp8", None)
    if quantization is None:
        return False
    quantization._forward_method = quantization.forward_cuda
    return True


_EXCHANGED = 4096
"""Rows that tensor-parallel ranks exchange at a time: 67 MB of 4,096 numbers in 32 bits."""


class PlainRows:
    """`size` rows as they were loaded, of a `head` that is sharded or not. Addresses of rows never
    change, as CUDA graphs hold them."""

    def __init__(self, head: Any, size: int) -> None:
        self._head = head
        self.weight = head.weight.detach().new_empty(size, head.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes)

    def take(self, ids: torch.Tensor) -> None:
        """Take the head's rows of `ids`, int64 ``[size]`` of the draft's vocabulary. All ranks of
        tensor parallelism call this at once, and each gets all rows."""
        take_rows(self._head, ids, out=self.weight)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply states ``[num_rows, hidden]``: logits ``[num_rows, size]``. Capturable."""
        return states @ self.weight.t()


class Fp8Rows:
    """`size` rows of a head that is kept in FP8; `head` says how they are sharded."""

    def __init__(self, fp8: Fp8Head, head: Any, size: int) -> None:
        self._fp8, self._head = fp8, head
        self.rows = fp8.empty(size)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes

    def take(self, ids: torch.Tensor) -> None:
        # Copies are of bytes: not every operator knows numbers of 8 bits.
        for source, target in zip(_bytes(self._fp8), _bytes(self.rows), strict=True):
            _take(source, self._head, ids, target, _sum_bytes)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        return self.rows.apply(self.rows, states)


HotRows = PlainRows | Fp8Rows


def take_rows(head: Any, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the head's weight rows of `ids` on every rank, wherever its shards lie."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    weight = head.weight.detach()
    if out is None:
        out = weight.new_empty(len(ids), weight.shape[1])
    return _take(weight, head, ids, out, tensor_model_parallel_all_reduce)


def _take(
    source: torch.Tensor,
    head: Any,
    ids: torch.Tensor,
    out: torch.Tensor,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Fill `out` with the rows of `ids`, and return it; `source` has those that this rank holds.
    `add_up` adds up tensors of all ranks: each row is on one rank, and zero on the others."""
    if head.tp_size == 1:
        return torch.index_select(source, 0, ids, out=out)
    shard = head.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    for wanted, filled in zip(ids.split(_EXCHANGED), out.split(_EXCHANGED), strict=True):
        mine = (wanted >= start) & (wanted < end)
        own = torch.zeros_like(filled)
        own[mine] = source[wanted[mine] - start]
        filled.copy_(add_up(own))
    return out


def _sum_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The sum of bytes ``[n, width]`` over all ranks, one of which has others than zeros."""
    return gather_rows(rows.view(torch.int32)).sum(0, dtype=torch.int32).view(torch.uint8)


def _bytes(head: Fp8Head) -> tuple[torch.Tensor, torch.Tensor]:
    return head.weight.view(torch.uint8), head.scale.view(torch.uint8)
