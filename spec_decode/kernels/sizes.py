"""Sizes of launches, as plain integers. Triton's own `cdiv` and `next_power_of_2` take microseconds
per call on the host, which add up over the layers of a step."""

from typing import Any


def cdiv(number: int, divisor: int) -> int:
    """Quotient of two positive integers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least a positive integer."""
    return 1 << (number - 1).bit_length()


_TOPK_PROGRAMS = 64
"""Most programs per row, except for the largest vocabularies: one program merges their results."""

_MIN_BLOCK, _MAX_BLOCK = 512, 4096
"""Bounds of a program's tokens. They are few, as it takes one maximum after another over all."""


def topk_block(vocab_size: int) -> tuple[int, int]:
    """Tokens and warps of a program that finds the best tokens in a part of a row."""
    block = next_power_of_2(cdiv(vocab_size, _TOPK_PROGRAMS))
    block = min(max(block, _MIN_BLOCK), _MAX_BLOCK)
    return block, block // _MIN_BLOCK


_MANY_PROGRAMS = 512
"""About four for each multiprocessor of a large GPU: with more, one may do what several did."""


def rows_per_program(num_rows: int, nodes: int, blocks: int) -> int:
    """Rows that a program takes of the `nodes` in succession that share their logits. It is the
    largest divisor of `nodes` that leaves many of the ``num_rows * blocks`` programs."""
    fitting = (
        each
        for each in range(nodes, 1, -1)
        if nodes % each == 0 and num_rows // each * blocks >= _MANY_PROGRAMS
    )
    return next(fitting, 1)


def topk_merge_warps(entries: int) -> int:
    """Warps of the program that merges so many best tokens of a row."""
    return 4 if entries > 512 else 1


def rank_block(candidates: int) -> tuple[int, int]:
    """Candidates that a program ranks, and how many others it compares them with at a time."""
    most = next_power_of_2(candidates)
    return min(32, most), min(128, most)


def moved_block(width: int) -> tuple[int, int]:
    """Rows and columns of a program that moves accepted rows of `width` elements."""
    return 8, min(1024, next_power_of_2(width))


def check_rows(*tensors: Any) -> None:
    """Raise a ValueError for a tensor whose last dimension is not contiguous."""
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides {tensor.stride()}")
