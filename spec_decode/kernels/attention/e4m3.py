"""Rows of an FP8 (e4m3) cache in the dtype that attention computes in, without FP8 hardware."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8 = (torch.uint8, torch.float8_e4m3fn)
"""Dtypes of an e4m3 cache."""

PLAIN, PACKED = 1, 2
"""How a kernel converts: each number by itself, or four of a register at once (PTX)."""

_PACKED = tl.constexpr(PACKED)


def conversion(cache: torch.Tensor, computed: torch.dtype) -> int:
    """How a kernel converts the rows of a cache to ``computed``; 0 if it need not.

    A tensor without memory stands for one on the GPU, where there is one.
    """
    if cache.dtype not in FP8:
        return 0
    on_nvidia = cache.device.type != "cpu" and torch.version.cuda is not None
    return PACKED if on_nvidia and computed.itemsize == 2 else PLAIN


def _pairs(shift: int, factor: int, kind: str) -> str:
    """PTX that makes four numbers of 16 bits of the bytes of a register.

    A byte moves to the upper half of its number, where its sign is right, and all but the sign to
    the right by ``shift``, which makes the exponent one of the wider dtype. The difference of the
    biases is a factor, a power of 2, by which even subnormal numbers become what they were.
    """
    lines = []
    for place, bytes_of in (("$0", "0x1404"), ("$1", "0x3424")):
        lines += [
            f"prmt.b32 t, $2, 0, {bytes_of};",
            "and.b32 u, t, 0x7f007f00;",
            f"shr.b32 u, u, {shift};",
            # (t & the signs) | u
            "lop3.b32 u, t, 0x80008000, u, 0xea;",
            f"fma.rn.{kind}x2 {place}, u, f, z;",
        ]
    setup = f"mov.b32 f, {factor:#x}; mov.b32 z, 0x80008000;"
    return "{ .reg .b32 t, u, f, z; " + setup + " ".join(lines) + " }"


_TO_BF16 = tl.constexpr(_pairs(4, 0x7B807B80, "bf16"))
_TO_FP16 = tl.constexpr(_pairs(1, 0x5C005C00, "f16"))


@triton.jit
def load_rows(pointers, mask, dtype: tl.constexpr, FP8: tl.constexpr):
    """Rows of K or V in ``dtype``; FP8 is what `conversion` says of their cache."""
    rows = tl.load(pointers, mask=mask, other=0)
    if FP8 == _PACKED:
        if dtype == tl.bfloat16:
            rows = tl.inline_asm_elementwise(
                _TO_BF16, "=r,=r,r", [rows], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            rows = tl.inline_asm_elementwise(
                _TO_FP16, "=r,=r,r", [rows], dtype=tl.float16, is_pure=True, pack=4
            )
    elif FP8:
        # An e4m3 number, its exponent and mantissa moved to those of an fp16, is that fp16 times
        # 2 ** 8 (the difference of the biases), subnormals included.
        bits = rows.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        rows = (half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    return rows
