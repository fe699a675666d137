"""What is kept of texts beyond the requests that they belong to, to find n-grams in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.reference import Owner

SEGMENT = 64
"""Tokens of a segment. No tree is deeper, and no match is longer: what belongs to a place is in its
segment, the one before, or the one behind."""

WAYS = 8
"""Occurrences that are kept of what has the same hash."""

LENGTHS = (8, 5, 3, 1)
"""Tokens that each index looks up, the longest first."""

SAME_PROMPT = 3
"""The index that is of answers to the same prompt alone. These are likely to repeat each other, so
that one token is enough, whatever the least length of other matches is."""

LONGEST = max(LENGTHS)

PROMPT_TOKENS = 1024
"""Tokens of a prompt's end that are kept at most, where prompts are: an answer waits for them, as
each step adds a segment of a text."""

CLASSES = 49
"""Kinds of matches in a memory, each with a rate; 0 is none. See `search_memory`."""

_SHARES, _SIZES = (0.3, 0.55, 0.85, 0.95), (1, 3, 5, 8)

SEGMENT_BYTES = SEGMENT * (4 + 8 * len(LENGTHS)) + 5 * 8
"""Bytes of a segment with its part of the index."""


@dataclass
class MemoryState:
    """A ring of texts with an index, and corpora behind it. Addresses are stable, so CUDA graphs
    may hold them.

    A text is a list of segments, which are given out in the ring's order; the newest one replaces
    the oldest. Segments are counted from 1 on by their *serials*. The address of a token is its
    segment's serial times `SEGMENT`, plus its place there: addresses only grow, and those of
    replaced segments are told from others by their serials alone.

    The index is a table of hashes without probing. The address of each token is put to where the
    hash of the `LENGTHS` tokens before it leads, into one of `WAYS` cells, which one its segment
    decides: cells hold a sample of the recent occurrences in different segments, in which frequent
    continuations are frequent. A cell keeps the largest address, so that the order in which
    programs write does not matter, and all ranks agree. A cell proves nothing: whoever reads it
    compares the very tokens and the scope.

    Corpora have segments and cells of their own, which no answer replaces. Each corpus added has
    larger serials than those before it; the rest of a serial's division by `corpora` is the
    segment. A corpus is dropped by taking the scope from its segments.

    Attributes:
        size: segments of the ring.
        tokens: i32 ``[size + corpora, SEGMENT]``, `BORDER` behind the end of a text.
        segments: i64 ``[size + corpora, 5]``: scope and prompt of its text, serial of the segment
            before, row of the one behind plus 1, number of the request; 0 for none.
        cells: i64 ``[buckets, WAYS]``, addresses; 0 for none. Those of corpora are behind.
        owners: i64 ``[max_reqs, 4]`` by request-state index: scope and prompt, the first token that
            is kept, and the number of the request, which no other one has.
        writers: i64 ``[max_reqs, 5]``, likewise: the first place of its text that is here without a
            gap, the place up to which it is here, the serial of its last segment (0 for none), the
            tokens in that, and the number of the request that all this is of.
        head: i64 ``[2]``: the next serial, and programs of a launch that are done.
        begun: ``owners`` as the host knows them.
    """

    size: int
    tokens: torch.Tensor
    segments: torch.Tensor
    cells: torch.Tensor
    owners: torch.Tensor
    writers: torch.Tensor
    head: torch.Tensor
    begun: np.ndarray
    is_told: bool = True

    @classmethod
    def allocate(
        cls, max_bytes: int, max_reqs: int, device: torch.device | str, corpora: int = 0
    ) -> MemoryState:
        """The largest memory of so many bytes, and of so many for corpora.

        Raises:
            ValueError: if each request could not have a few segments.
        """
        size = (max_bytes - bytes_of(0, max_reqs)) // SEGMENT_BYTES
        if size < 2 * max_reqs:
            least = bytes_of(2 * max_reqs, max_reqs)
            raise ValueError(
                f"a memory for {max_reqs} requests has at least {least} bytes, not {max_bytes}"
            )

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        count = size + corpora // SEGMENT_BYTES
        return cls(
            size,
            tokens=torch.zeros(count, SEGMENT, dtype=torch.int32, device=device),
            segments=zeros(count, 5),
            cells=zeros(count * SEGMENT * len(LENGTHS) // WAYS, WAYS),
            owners=zeros(max_reqs, 4),
            writers=zeros(max_reqs, 5),
            head=torch.tensor([1, 0], device=device),
            begun=np.zeros((max_reqs, 4), dtype=np.int64),
        )

    def begin(self, slot: int, owner: Owner, first: int) -> None:
        """Let a slot's text be another one, from the token number ``first`` on, at `tell`."""
        self.begun[slot] = (*owner, first, self.begun[:, 3].max() + 1)
        self.is_told = False

    def tell(self) -> None:
        """Tell the device of all texts that were begun, behind what it was asked to do before."""
        if self.is_told:
            return
        self.is_told = True
        # The host does not wait for the copy, which keeps what it reads until it has been made.
        rows = torch.from_numpy(self.begun)
        self.owners.copy_(rows.pin_memory() if self.owners.is_cuda else rows, non_blocking=True)

    @property
    def corpora(self) -> int:
        """Segments of corpora."""
        return len(self.tokens) - self.size

    @property
    def num_bytes(self) -> int:
        """Device bytes."""
        on_device = (self.tokens, self.segments, self.cells, self.owners, self.writers, self.head)
        return sum(each.nbytes for each in on_device)


def bytes_of(segments: int, max_reqs: int) -> int:
    """Bytes of a memory of so many segments; each request needs two."""
    return 8 * (9 * max_reqs + 2) + segments * SEGMENT_BYTES


def first_rates() -> Sequence[float]:
    """Rates of the `CLASSES`, until texts are seen."""
    by_length = [(1 - 1 / (n + 1)) * share for n in _SIZES for share in _SHARES]
    return [0.5, *by_length, *by_length, *by_length]
