"""What is kept of texts beyond the requests that they belong to, to find n-grams in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.reference import Owner

SEGMENT = 64
"""Tokens of a segment. No tree is deeper, and no match is longer: what belongs to a place is in its
segment, the one before, or the one behind."""

WAYS = 8
"""Occurrences that are kept of what has the same hash."""

LENGTHS = (8, 5, 3, 3)
"""Tokens that each index looks up, the longest first."""

SAME_PROMPT = 3
"""The index that is of answers to the same prompt alone."""

LONGEST = max(LENGTHS)

PROMPT_TOKENS = 1024
"""Tokens of a prompt's end that are kept at most, where prompts are: an answer waits for them, as
each step adds a segment of a text."""

CLASSES = 33
"""Kinds of matches in a memory, each with a rate; 0 is none. See `match_memory`."""

_SHARES, _SIZES = (0.3, 0.55, 0.85, 0.95), (3, 5, 8, 16)

_SEGMENT_BYTES = SEGMENT * (4 + 8 * len(LENGTHS)) + 4 * 8


@dataclass(frozen=True)
class MemoryState:
    """A ring of texts with an index. Addresses are stable, so CUDA graphs may hold them.

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

    Attributes:
        tokens: i32 ``[segments, SEGMENT]``, `BORDER` behind the end of a text.
        segments: i64 ``[segments, 4]``: scope and prompt of its text, serials of the segments
            before and behind; 0 for none.
        cells: i64 ``[buckets, WAYS]``, addresses; 0 for none.
        writers: i64 ``[max_reqs, 6]`` by request-state index: scope and prompt, the first place of
            its text that is here without a gap, the place up to which it is here, the serial of its
            last segment (0 for none), and the tokens in that.
        turns: i64 ``[max_reqs, 4]`` by batch row, what is added in a step: tokens, the serial of
            the last segment and the tokens in it, and the serial of a new segment or 0.
        head: i64 ``[1]``, the next serial.
    """

    tokens: torch.Tensor
    segments: torch.Tensor
    cells: torch.Tensor
    writers: torch.Tensor
    turns: torch.Tensor
    head: torch.Tensor

    @classmethod
    def allocate(cls, max_bytes: int, max_reqs: int, device: torch.device | str) -> MemoryState:
        """The largest memory of so many bytes.

        Raises:
            ValueError: if each request could not have a few segments.
        """
        count = (max_bytes - bytes_of(0, max_reqs)) // _SEGMENT_BYTES
        if count < 2 * max_reqs:
            least = bytes_of(2 * max_reqs, max_reqs)
            raise ValueError(
                f"a memory for {max_reqs} requests has at least {least} bytes, not {max_bytes}"
            )

        def zeros(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        return cls(
            tokens=torch.zeros(count, SEGMENT, dtype=torch.int32, device=device),
            segments=zeros(count, 4),
            cells=zeros(count * SEGMENT * len(LENGTHS) // WAYS, WAYS),
            writers=zeros(max_reqs, 6),
            turns=zeros(max_reqs, 4),
            head=zeros(1) + 1,
        )

    def begin(self, slot: int, owner: Owner, first: int) -> None:
        """Let a slot's text be another one, from the token number ``first`` on."""
        row = torch.tensor([*owner, first, first, 0, 0])
        if self.writers.device.type == "cuda":
            # The host does not wait for the copy, which keeps the row until it has been made.
            row = row.pin_memory()
        self.writers[slot].copy_(row, non_blocking=True)

    @property
    def size(self) -> int:
        """Segments."""
        return len(self.tokens)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values())


def bytes_of(segments: int, max_reqs: int) -> int:
    """Bytes of a memory of so many segments; each request needs two."""
    return 8 * (10 * max_reqs + 1) + segments * _SEGMENT_BYTES


def first_rates() -> Sequence[float]:
    """Rates of the `CLASSES`, until texts are seen."""
    by_length = [(1 - 1 / (n + 1)) * share for n in _SIZES for share in _SHARES]
    return [0.5, *by_length, *by_length]
