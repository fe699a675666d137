"""One program per row of logits, where Triton is interpreted and a vocabulary is large.

A program costs the interpreter milliseconds, and little more if it is wide. A row of 262,144 tokens
takes 256 programs of vLLM's sampler and 64 of a tree's drafts, which were four fifths of a step.
One program of all blocks finds the same tokens, and writes them where the first block does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock


class WholeRows:
    """Stands for `_gumbel_sample_kernel`, whose grid is rows by blocks of the vocabulary."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        """The launch of a grid."""
        rows, blocks = grid

        def launch(*given: Any, BLOCK_SIZE: int, **named: Any) -> None:
            # The best of each block, of which only the first is written.
            given[2].fill_(-math.inf)
            size = 1 << (blocks * BLOCK_SIZE - 1).bit_length()
            self._kernel[rows, 1](*given, BLOCK_SIZE=size, **named)

        return launch


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Sample, and find the tokens of a tree, with one program per row."""
    from vllm.v1.worker.gpu.sample import gumbel

    from vllm_graft.spec_decode.kernels import topk

    def block(vocab_size: int) -> tuple[int, int]:
        return 1 << (vocab_size - 1).bit_length(), 1

    kernel = WholeRows(gumbel._gumbel_sample_kernel)
    with (
        mock.patch.object(gumbel, "_gumbel_sample_kernel", kernel),
        mock.patch.object(topk, "topk_block", block),
    ):
        yield
