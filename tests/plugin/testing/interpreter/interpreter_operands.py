"""Results of operations on operands of each type: the types, the shapes and the values.

The test computes the table with the mends; run as a script, in the stock interpreter, this file
prints it. Small floats are left out: there the two differ, as they should.
"""

import itertools
import json
import os
import sys

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

N = 4
TYPES = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
LITERALS = [0, 1, 3, -2, 200, 2**31 - 1, 2**31, -(2**40), True, 0.5, -0.0, 1e39, float("inf")]
FOUND: list[list[object]] = []


def note(result):
    FOUND.append([str(result.type), result.handle.data.dtype.name, str(result.handle.data)])


@triton.jit
def arithmetic(x, y):
    note(x + y)
    note(x - y)
    note(x * y)
    note(x < y)
    note(x == y)
    note(x != y)
    note(x <= y)
    note(x > y)
    note(x >= y)
    note(tl.where(x < y, x, y))
    note(tl.maximum(x, y))


@triton.jit
def division(x, y):
    note(x / y)


@triton.jit
def remainder(x, y):
    note(x // y)
    note(x % y)


@triton.jit
def bits(x, y):
    note(x & y)
    note(x ^ y)
    note(x | y)
    note(x << y)
    note(x >> y)


@triton.jit
def of_tensors(x, y, operation: tl.constexpr, shape: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    if shape == "blocks":
        operation(tl.load(x + i), tl.load(y + i))
    elif shape == "scalars":
        operation(tl.load(x), tl.load(y))
    elif shape == "scalar left":
        operation(tl.load(x), tl.load(y + i))
    elif shape == "scalar right":
        operation(tl.load(x + i), tl.load(y))
    elif shape == "outer":
        operation(tl.load(x + i)[:, None], tl.load(y + i)[None, :])


@triton.jit
def of_literal(x, operation: tl.constexpr, literal: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    operation(tl.load(x + i), literal)
    operation(literal, tl.load(x + i))
    operation(tl.load(x), literal)


@triton.jit
def addresses(x, N: tl.constexpr):
    i = tl.arange(0, N)
    note(tl.load(x + i))
    note(tl.load(i + x))
    note(tl.load(x + 1 + i.to(tl.int64)))
    note(tl.load(x + i[:, None] + i.to(tl.uint32)[None, :], mask=i[:, None] < 2, other=5))
    note(tl.load((x + 4) + -3 + i))
    note(tl.load(x + i[None, :] + 0 * i[:, None], mask=(i < 2)[None, :], other=tl.load(x)))
    note(tl.load(x + i, mask=i < 2))
    # Constants are made once, so changes to one use must not reach the next.
    note(tl.full((N,), 3, tl.int32) * 3 + i * 3)
    note(tl.load(x).to(tl.int64))
    for kind in (tl.int8, tl.uint32, tl.int64, tl.float16, tl.float32, tl.float64):
        note(tl.load(x + i).to(kind))
    tl.store(x + (i[:, None] + i[None, :]) % N, tl.load(x + i)[:, None], mask=i[:, None] < 1)
    note(tl.load(x + i))
    tl.store(x + i, tl.load(x + 1), mask=i < 2)
    tl.store(x + 3, 200.0)
    note(tl.load(x + i))
    tl.store(x + i, 3)
    note(tl.load(x + i) + 3)


@triton.jit
def axes(x, N: tl.constexpr):
    i = tl.load(x + tl.arange(0, N))
    note(i[None, :])
    note(i[:, None])
    note(i[:])
    note(i[None])
    note(i[:, None][None, :, :, None])
    note((i[:, None] + i[None, :])[None, :])
    note(tl.load(x)[None, None])
    note(i[:, None] + i)
    note(i[:, :])


@triton.jit
def unfit(x, N: tl.constexpr):
    """Return shapes that cannot be joined."""
    note(tl.load(x + tl.arange(0, N)) + tl.load(x + tl.arange(0, 2)))


@triton.jit
def wide_mask(x, N: tl.constexpr):
    """Refuse a mask that has more elements than there are pointers."""
    note(tl.load(x, mask=tl.arange(0, N) < 2))


SHAPES = ["blocks", "scalars", "scalar left", "scalar right", "outer"]
OPERATIONS = [arithmetic, division, remainder, bits]


def values(dtype):
    return torch.tensor([3, 1, 2, 7, 5, 4, 6, 1, 3, 2], dtype=dtype)


def attempt(kernel, *inputs, **constexprs):
    """Run the kernel; return what it noted, with the error that ended it."""
    FOUND.clear()
    try:
        kernel[(1,)](*inputs, N=N, **constexprs)
    except Exception as error:
        # The text of an error may name an address.
        FOUND.append([type(error).__name__, str(error).split("(")[0]])
    return list(FOUND)


def table(names=tuple(TYPES)):
    """Return the results by the name of the case, of these types."""
    found, types = {}, {name: TYPES[name] for name in names}
    for operation in OPERATIONS:
        for (left, x), (right, y) in itertools.product(types.items(), types.items()):
            for shape in SHAPES if {left, right} <= {"int32", "int64", "fp32"} else SHAPES[:1]:
                name = f"{left} {operation.__name__} {right}, {shape}"
                found[name] = attempt(
                    of_tensors, values(x), values(y), operation=operation, shape=shape
                )
        for (name, x), literal in itertools.product(types.items(), LITERALS):
            key = f"{name} {operation.__name__} {literal}"
            found[key] = attempt(of_literal, values(x), operation=operation, literal=literal)
    for name, x in types.items():
        for kernel in (addresses, axes, unfit, wide_mask):
            found[f"{kernel.__name__} {name}"] = attempt(kernel, values(x))
    return found


if __name__ == "__main__":
    json.dump(table(sys.argv[1:]), sys.stdout)
