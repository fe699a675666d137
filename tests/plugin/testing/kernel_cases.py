"""Two kernels for the compile-only check; both run in the interpreter."""

import triton
import triton.language as tl

from vllm_graft.testing.compiling import KernelCase


@triton.jit
def walk(parents, depth, N: tl.constexpr):
    node = tl.program_id(0)
    steps = 0
    while node >= 0:
        node = tl.load(parents + node)
        steps += 1
    tl.store(depth + tl.program_id(0) + tl.arange(0, N), steps)


@triton.jit
def one_branch(x, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    if tl.sum(value, 0) > 0:
        result = value
    tl.store(x + tl.arange(0, N), result)


CASES = [
    KernelCase(
        "walk",
        "kernel_cases:walk",
        {"parents": "*i32", "depth": "*i32"},
        {"N": 1},
        {"num_warps": 1},
    ),
    KernelCase("one branch", "kernel_cases:one_branch", {"x": "*fp32"}, {"N": 16}),
]
