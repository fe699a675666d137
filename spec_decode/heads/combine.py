"""The `fc` of an EAGLE-3 draft, which combines the target's states before the compiled pass."""

from __future__ import annotations

from typing import Any


def quantize_by_kernel(draft: Any) -> bool:
    """Let a quantised `fc` quantise its input by vLLM's kernel; return whether there was one.

    Outside of a compiled model vLLM compiles the torch form of its quantisation (`QuantFP8`)
    separately. A call of that form costs the host guards besides the launch, in every step. The
    kernel computes the same, with one scale per row.

    Args:
        draft: the loaded draft; one without `fc`, or with an `fc` in bf16, stays as it is.
    """
    fc = getattr(getattr(draft, "model", None), "fc", None)
    kernel = getattr(getattr(fc, "quant_method", None), "fp8_linear", None)
    quantization = getattr(kernel, "quant_fp8", None)
    if quantization is None:
        return False
    quantization._forward_method = quantization.forward_cuda
    return True
