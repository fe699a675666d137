"""A tree's rows as one chunk: which rows continue which, what decays between them, products."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.sizes import next_power_of_2

PART = 32
"""Columns of a state that a program multiplies at a time: with all of them it would run out of
registers."""

LEAST = 16
"""Rows, columns and terms of a product of tensor cores, at least."""

_MAX_VALUES = 32
"""Rows of a head's state that a program reads."""


@triton.jit
def product(left, right):
    """A product of f32 matrices, as exact as f32 on tensor cores too."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def continuing(masks, line, row, inside):
    """Whether each row of a request continues each other one, or is it.

    Args:
        masks: i64, a bit for each row that a row continues.
        line: places of the request's rows in it.
        row: the rows, counted from the request's first one.
        inside: which of these exist.
    """
    bits = tl.load(masks + line, mask=inside, other=0)
    return ((bits[:, None] >> row[None, :].to(tl.int64)) & 1) != 0


@triton.jit
def decayed(continues, decay):
    """Logarithms of decays from the root to each row, and decays from each row to each other one.

    Args:
        continues: as of `continuing`.
        decay: f32 ``[rows]``, logarithms of the rows' own decays.

    Returns:
        f32 ``[rows]`` and f32 ``[rows, rows]``; rows that a row does not continue have no share.
    """
    total = tl.sum(tl.where(continues, decay[None, :], 0.0), 1)
    # From a node to one that continues it there are decays alone, so that no power overflows.
    between = tl.where(continues, total[:, None] - total[None, :], 0)
    return total, tl.where(continues, tl.exp(between), 0)


@triton.jit
def solved(given, ahead, depth):
    """What each row writes into the state: what it is given, less what its ancestors have written.

    A row follows its ancestors, so that ``(1 + ahead) x = given`` has a lower triangle, and as many
    rounds as the tree is deep solve it exactly.

    Args:
        given: f32 ``[rows, values]``.
        ahead: f32 ``[rows, rows]``, the share of each ancestor's; 0 elsewhere.
        depth: rows of the longest path.
    """
    written = given
    for _ in range(1, depth):
        written = given - product(ahead, written)
    return written


def chunk_sizes(value: int, max_rows: int) -> dict[str, int]:
    """Constants and warps of a kernel whose heads have states of `value` rows."""
    rows = max(LEAST, next_power_of_2(max_rows))
    return {
        "PART": PART,
        "VALUES": min(_MAX_VALUES, max(LEAST, next_power_of_2(value))),
        "ROWS": rows,
        "num_warps": 4 if rows <= 32 else 8,
    }
