"""Small kernels, each of which computes what a GPU computes, or does not.

``CHECKS`` maps a name to a function that returns whether the kernel is right. The test runs them
with the mends; run as a script, in the stock interpreter, this file prints the names of those that
are wrong or fail.
"""

import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import triton.language.extra.libdevice as libdevice

N = 256
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def values(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(N, generator=generator) * 100).to(dtype)


def same(kernel, expected, *inputs, **constexprs):
    out = torch.zeros_like(expected)
    kernel[(1,)](*inputs, out, N=N, **constexprs)
    return torch.equal(torch.nan_to_num(out.float(), 7.0), torch.nan_to_num(expected.float(), 7.0))


@triton.jit
def cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, tl.maximum(a * b, a - b))


@triton.jit
def compare(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) < tl.load(y + i))


@triton.jit
def reduce_max(x, out, N: tl.constexpr):
    tl.store(out, tl.reduce(tl.load(x + tl.arange(0, N)), 0, tl.standard._elementwise_max))


@triton.jit
def scan(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0))


@triton.jit
def dot(x, out, N: tl.constexpr):
    i = tl.arange(0, 16)
    place = i[:, None] * 16 + i[None, :]
    a = tl.load(x + place)
    tl.store(out + place, tl.dot(a, a, input_precision="ieee"))


@triton.jit
def boolean(x, out, N: tl.constexpr, HAS_X: tl.constexpr):
    i = tl.arange(0, N)
    inside = i > 2
    if HAS_X and tl.load(x) > -1e9:
        even = i % 2 == 0
    tl.store(out + i, inside and even and not (i > 100 or i == 50))


@triton.jit
def scalar_mask(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    valid = tl.load(x) > 0
    tl.store(out + i, tl.full((N,), 1, tl.int32), mask=valid & (i < 8))


@triton.jit
def scalar_load_mask(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    for k in range(2):
        loaded = tl.load(x + i, mask=tl.load(x + k).to(tl.int1), other=i)
        tl.store(out + k * N + i, loaded)


@triton.jit
def induction(x, out, N: tl.constexpr):
    for i in range(N):
        tl.store(out + i, tl.load(x + i.to(tl.int64)))


@triton.jit
def log1p(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, libdevice.log1p(tl.load(x + i)))


@check
def libdevice_function():
    out = torch.zeros(N)
    log1p[(1,)](values().abs(), out, N=N)
    return torch.allclose(out, values().abs().log1p())


@triton.jit
def read_first(x, out, N: tl.constexpr):
    tl.store(out, tl.load(x))


@check
def launch_does_not_copy_the_whole_storage():
    class Counting(torch.Tensor):
        copies = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if getattr(function, "__name__", "") == "untyped_storage":
                Counting.copies += 1
            return super().__torch_function__(function, types, args, kwargs or {})

    read_first[(1,)](torch.ones(4).as_subclass(Counting), torch.zeros(1), N=N)
    return Counting.copies == 0


@triton.jit
def sort(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.sort(tl.load(x + i), descending=True))


@triton.jit
def topk(x, out, N: tl.constexpr, K: tl.constexpr):
    tl.store(out + tl.arange(0, K), tl.topk(tl.load(x + tl.arange(0, N)), K))


@triton.jit
def gather(x, index, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(index + i), 0))


@triton.jit
def larger(a, i, b, j):
    return tl.where(a > b, a, b), tl.where(a > b, i, j)


@triton.jit
def reduce_pairs(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    best, place = tl.reduce((tl.load(x + i), i), 0, larger)
    tl.store(out, best)
    tl.debug_barrier()
    tl.store(out + 1, place.to(tl.float32))


@triton.jit
def then(slope, offset, next_slope, next_offset):
    """One linear map after another: associative, but not commutative."""
    return slope * next_slope, offset * next_slope + next_offset


@triton.jit
def compose(x, out, N: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    place = tl.arange(0, 8)[:, None] * (N // 8) + tl.arange(0, N // 8)[None, :]
    maps = tl.load(x + place)
    slope, offset = tl.reduce((maps, maps + 1), AXIS, then, keep_dims=KEEP)
    if AXIS is None:
        tl.store(out, slope * 3 + offset)
    else:
        rest: tl.constexpr = N // 8 if AXIS == 0 else 8
        tl.store(out + tl.arange(0, rest), tl.reshape(slope * 3 + offset, [rest]))


def composed(maps, axis):
    """The same in plain Python; int32 wraps around."""
    found = []
    rows = maps.view(8, -1)
    for row in [rows.flatten()] if axis is None else rows.unbind(1 - axis):
        slope, offset = 1, 0
        for each in row.tolist():
            slope, offset = slope * each, offset * each + each + 1
        total = (slope * 3 + offset) % 2**32
        found.append(total - 2**32 if total >= 2**31 else total)
    return torch.tensor(found, dtype=torch.int32)


@check
def sound_reduce_in_order_along_each_axis():
    return all(
        same(compose, composed(MAPS, axis), MAPS, AXIS=axis, KEEP=keep)
        for axis in (0, 1)
        for keep in (False, True)
    )


@triton.jit
def atomics(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out + i % 2, tl.load(x + i))
    tl.atomic_max(out + 2, tl.max(tl.load(x + i), 0))
    tl.atomic_cas(out + 3, 0, 7)
    tl.atomic_or(out + 4, 5)
    tl.atomic_xchg(out + 5, 3)


X, SMALL = values(), values(torch.bfloat16)
FLIPPED = SMALL.flip(0)
PLACES = torch.arange(N, dtype=torch.int32)
BYTES = torch.arange(N, dtype=torch.uint8)
E4M3, E5M2 = BYTES.view(torch.float8_e4m3fn), BYTES.view(torch.float8_e5m2).clone()
SQUARE = (PLACES.reshape(16, 16) % 3).bfloat16()
BITS = (PLACES % 2).bfloat16()
MAPS = torch.randint(-5, 5, (N,), generator=torch.Generator().manual_seed(1)).int()
LARGE = torch.randperm(N, generator=torch.Generator().manual_seed(1)) << 33
MASK = torch.cat([torch.tensor([0, 5], dtype=torch.int32), PLACES.flip(0)[2:]])
INSIDE = (PLACES > 2) & (PLACES % 2 == 0) & ~((PLACES > 100) | (PLACES == 50))
BEST = torch.tensor([float(X.max()), float(X.argmax())])
SUMS = torch.tensor(
    [int(PLACES[0::2].sum()), int(PLACES[1::2].sum()), N - 1, 7, 5, 3], dtype=torch.int32
)
# The stock interpreter computes what is sound right as well; our kernels rely on it.
CHECKS |= {
    "float32_to_bfloat16_rounds_to_nearest_even": lambda: same(cast, X.bfloat16(), X),
    "integer_to_bfloat16": lambda: same(cast, PLACES.bfloat16(), PLACES),
    "every_float8_e4m3_to_float32": lambda: same(cast, E4M3.float(), E4M3),
    "every_float8_e5m2_to_bfloat16": lambda: same(cast, E5M2.bfloat16(), E5M2),
    "float32_to_float8_saturates": lambda: same(
        cast, (X * 10).clamp(-448, 448).to(torch.float8_e4m3fn), X * 10
    ),
    "bfloat16_arithmetic": lambda: same(
        arithmetic, torch.maximum(SMALL * FLIPPED, SMALL - FLIPPED), SMALL, FLIPPED
    ),
    "bfloat16_comparison": lambda: same(compare, SMALL < FLIPPED, SMALL, FLIPPED),
    "bfloat16_reduction": lambda: same(reduce_max, SMALL.max().reshape(1), SMALL),
    "bfloat16_scan": lambda: same(scan, BITS.cumsum(0), BITS),
    "bfloat16_dot": lambda: same(dot, SQUARE.float() @ SQUARE.float(), SQUARE),
    "and_or_not_of_blocks": lambda: same(boolean, INSIDE, X, HAS_X=True),
    "scalar_comparison_as_mask": lambda: same(
        scalar_mask, (PLACES < 8).int(), torch.ones_like(PLACES[:1])
    ),
    "scalar_mask_of_a_load": lambda: same(scalar_load_mask, torch.cat([PLACES, MASK]), MASK),
    "induction_variable_is_a_tensor": lambda: same(induction, X, X),
    "reduce_of_several_whole_blocks": lambda: same(
        compose, composed(MAPS, None), MAPS, AXIS=None, KEEP=False
    ),
    "sound_sort_of_int64": lambda: same(sort, LARGE.sort(descending=True).values, LARGE),
    "sound_topk": lambda: same(topk, X.topk(8).values, X, K=8),
    "sound_gather": lambda: same(gather, X.flip(0), X, PLACES.flip(0)),
    "sound_reduce_of_pairs": lambda: same(reduce_pairs, BEST, X),
    "sound_atomics": lambda: same(atomics, SUMS, PLACES),
}


def wrong() -> list[str]:
    names = []
    for name, function in CHECKS.items():
        try:
            right = function()
        except Exception:
            right = False
        if not right:
            names.append(name)
    return names


if __name__ == "__main__":
    json.dump(wrong(), sys.stdout)
