"""A kernel that the interpreter accepts, and the compiler refuses: a name of one branch alone."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def one_branch_kernel(x, N: tl.constexpr):
    value = tl.load(x + tl.arange(0, N))
    if tl.sum(value, 0) > 0:
        result = value
    tl.store(x + tl.arange(0, N), result)
