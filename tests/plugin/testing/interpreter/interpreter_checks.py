"""Small kernels, each of which computes what a GPU computes, or does not.

``CHECKS`` maps a name to a function that returns whether the kernel is right. The test runs them
with the mends; run as a script, in the stock interpreter, this file prints the names of those that
are wrong or fail.
"""

from __future__ import annotations

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


@check
def float32_to_bfloat16_rounds_to_nearest_even():
    return same(cast, values().bfloat16(), values())


@check
def integer_to_bfloat16():
    x = torch.arange(N, dtype=torch.int32)
    return same(cast, x.bfloat16(), x)


@check
def every_float8_e4m3_to_float32():
    x = torch.arange(N, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return same(cast, x.float(), x)


@check
def every_float8_e5m2_to_bfloat16():
    x = torch.arange(N, dtype=torch.uint8).view(torch.float8_e5m2).clone()
    return same(cast, x.bfloat16(), x)


@check
def float32_to_float8_saturates():
    x = values() * 10
    return same(cast, x.clamp(-448, 448).to(torch.float8_e4m3fn), x)


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    tl.store(out + i, tl.maximum(a * b, a - b))


@check
def bfloat16_arithmetic():
    a, b = values(torch.bfloat16), values(torch.bfloat16).flip(0)
    return same(arithmetic, torch.maximum(a * b, a - b), a, b)


@triton.jit
def compare(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) < tl.load(y + i))


@check
def bfloat16_comparison():
    a, b = values(torch.bfloat16), values(torch.bfloat16).flip(0)
    return same(compare, a < b, a, b)


@triton.jit
def reduce_max(x, out, N: tl.constexpr):
    tl.store(out, tl.reduce(tl.load(x + tl.arange(0, N)), 0, tl.standard._elementwise_max))


@check
def bfloat16_reduction():
    x = values(torch.bfloat16)
    return same(reduce_max, x.max().reshape(1), x)


@triton.jit
def scan(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.cumsum(tl.load(x + i), 0))


@check
def bfloat16_scan():
    x = (torch.arange(N) % 2).bfloat16()
    return same(scan, x.cumsum(0), x)


@triton.jit
def dot(x, out, N: tl.constexpr):
    i = tl.arange(0, 16)
    place = i[:, None] * 16 + i[None, :]
    a = tl.load(x + place)
    tl.store(out + place, tl.dot(a, a, input_precision="ieee"))


@check
def bfloat16_dot():
    a = (torch.arange(N).reshape(16, 16) % 3).bfloat16()
    return same(dot, a.float() @ a.float(), a)


@triton.jit
def boolean(x, out, N: tl.constexpr, HAS_X: tl.constexpr):
    i = tl.arange(0, N)
    inside = i > 2
    if HAS_X and tl.load(x) > -1e9:
        even = i % 2 == 0
    tl.store(out + i, inside and even and not (i > 100 or i == 50))


@check
def and_or_not_of_blocks():
    i = torch.arange(N)
    expected = (i > 2) & (i % 2 == 0) & ~((i > 100) | (i == 50))
    return same(boolean, expected, values(), HAS_X=True)


@triton.jit
def scalar_mask(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    valid = tl.load(x) > 0
    tl.store(out + i, tl.full((N,), 1, tl.int32), mask=valid & (i < 8))


@check
def scalar_comparison_as_mask():
    return same(scalar_mask, (torch.arange(N) < 8).int(), torch.ones(1, dtype=torch.int32))


@triton.jit
def scalar_load_mask(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    for k in range(2):
        loaded = tl.load(x + i, mask=tl.load(x + k).to(tl.int1), other=i)
        tl.store(out + k * N + i, loaded)


@check
def scalar_mask_of_a_load():
    x = torch.arange(N, dtype=torch.int32).flip(0)
    x[0], x[1] = 0, 5
    return same(scalar_load_mask, torch.cat([torch.arange(N, dtype=torch.int32), x]), x)


@triton.jit
def induction(x, out, N: tl.constexpr):
    for i in range(N):
        tl.store(out + i, tl.load(x + i.to(tl.int64)))


@check
def induction_variable_is_a_tensor():
    return same(induction, values(), values())


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


# The stock interpreter computes these right as well; our kernels rely on them.


@triton.jit
def sort(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.sort(tl.load(x + i), descending=True))


@check
def sound_sort_of_int64():
    x = torch.randperm(N, generator=torch.Generator().manual_seed(1)) << 33
    return same(sort, x.sort(descending=True).values, x)


@triton.jit
def topk(x, out, N: tl.constexpr, K: tl.constexpr):
    tl.store(out + tl.arange(0, K), tl.topk(tl.load(x + tl.arange(0, N)), K))


@check
def sound_topk():
    return same(topk, values().topk(8).values, values(), K=8)


@triton.jit
def gather(x, index, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.gather(tl.load(x + i), tl.load(index + i), 0))


@check
def sound_gather():
    index = torch.arange(N, dtype=torch.int32).flip(0)
    return same(gather, values().flip(0), values(), index)


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


@check
def sound_reduce_of_pairs():
    best, place = values().max(0)
    return same(reduce_pairs, torch.stack([best, place.float()]), values())


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
    maps = torch.randint(-5, 5, (N,), generator=torch.Generator().manual_seed(1)).int()
    return all(
        same(compose, composed(maps, axis), maps, AXIS=axis, KEEP=keep)
        for axis in (0, 1)
        for keep in (False, True)
    )


@check
def reduce_of_several_whole_blocks():
    maps = torch.randint(-5, 5, (N,), generator=torch.Generator().manual_seed(1)).int()
    return same(compose, composed(maps, None), maps, AXIS=None, KEEP=False)


@triton.jit
def atomics(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.atomic_add(out + i % 2, tl.load(x + i))
    tl.atomic_max(out + 2, tl.max(tl.load(x + i), 0))
    tl.atomic_cas(out + 3, 0, 7)
    tl.atomic_or(out + 4, 5)
    tl.atomic_xchg(out + 5, 3)


@check
def sound_atomics():
    x = torch.arange(N, dtype=torch.int32)
    sums = [int(x[0::2].sum()), int(x[1::2].sum())]
    return same(atomics, torch.tensor([*sums, N - 1, 7, 5, 3], dtype=torch.int32), x)


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
