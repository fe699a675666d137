"""How attention reads the rows of an FP8 (e4m3) cache, with hardware for FP8 and without."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

FP8 = (torch.uint8, torch.float8_e4m3fn)
"""Dtypes of an e4m3 cache."""

PLAIN, PACKED, PRODUCTS = 1, 2, 3
"""What a kernel does with e4m3 keys and values.

``PLAIN`` converts each number by itself to the dtype of the query, and ``PACKED`` four of a
register at once (PTX); neither needs hardware for FP8. ``PRODUCTS`` needs it, and an e4m3 query: it
multiplies queries and keys as they are, and converts the values to fp16, which holds all of e4m3's
numbers, and the softmax's weights with three bits more than bf16. Tensor cores of sm_90 add such
products with about 14 bits."""

_PACKED = tl.constexpr(PACKED)
_PRODUCTS = tl.constexpr(PRODUCTS)

_HARDWARE = (8, 9)
"""The first compute capability that converts and multiplies e4m3 numbers."""

MEASURED = (9, 0)
"""The compute capability on which taking such queries was measured to be faster."""


def native(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """Whether kernels take e4m3 queries on such a device; a layer converts them before elsewhere.
    Outputs of 32 bits are not computed from weights in fp16."""
    return capability == MEASURED and dtype.itemsize == 2


def refuse_without_hardware(capability: tuple[int, int]) -> None:
    """Raise a ValueError for an e4m3 query on a device known to have no instructions for it."""
    if (0, 0) < capability < _HARDWARE:
        major, minor = capability
        raise ValueError(
            f"an e4m3 query needs compute capability 8.9 or more, this device has {major}.{minor}: "
            "convert the query to 16 bits before"
        )


def conversion(cache: torch.Tensor, query: torch.dtype) -> int:
    """What a kernel does with the rows of a cache beside a query; 0 if they have the same dtype."""
    if cache.dtype not in FP8:
        return 0
    if query in FP8:
        return PRODUCTS
    on_nvidia = cache.device.type != "cpu" and torch.version.cuda is not None
    return PACKED if on_nvidia and query.itemsize == 2 else PLAIN


def _pairs(shift: int, factor: int, kind: str) -> str:
    """PTX that makes four numbers of 16 bits of the bytes of a register. A byte moves to the upper
    half of its number, where its sign is right, and all but the sign to the right by ``shift``,
    which makes the exponent one of the wider dtype. The difference of the biases is a factor, a
    power of 2, by which even subnormal numbers become what they were."""
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
    """Rows of K or V in ``dtype``; FP8 is what `conversion` says of their cache. The pointers are
    those of bytes for ``PLAIN`` and ``PACKED``, and of e4m3 numbers beyond."""
    rows = tl.load(pointers, mask=mask, other=0.0 if FP8 == _PRODUCTS else 0)
    if FP8 == _PRODUCTS:
        rows = rows.to(dtype)
    elif FP8 == _PACKED:
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
