"""A slow, plain version of a memory of texts: the oracle of its kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_graft.spec_decode.trees.text_state import (
    LENGTHS,
    LONGEST,
    NOBODY,
    SAME_PROMPT,
    SEGMENT,
    WAYS,
    Owner,
)

_FACTOR, _MASK = 0x2545F4914F6CDD1D, (1 << 64) - 1


def _hash(owner: Owner, index: int, before: Sequence[int]) -> int:
    """The hash of the tokens before a place, in 64 bits."""
    value = ((owner.prompt if index == SAME_PROMPT else owner.scope) + index) * _FACTOR & _MASK
    for token in reversed(before):
        value = (value ^ (token & _MASK)) * _FACTOR & _MASK
        value ^= value >> 29 & 0x7FFFFFFFF
    return value >> 8 & 0x7FFFFFFFFFFF


@dataclass
class Segment:
    owner: Owner
    number: int
    before: Segment | None
    tokens: list[int] = field(default_factory=list)
    behind: Segment | None = None
    serial: int = 0


@dataclass
class Writer:
    owner: Owner
    number: int
    done: int
    begin: int
    last: Segment | None = None


class Found(NamedTuple):
    """A match: its class, where it goes on, and all that follows in its text."""

    kind: int
    place: int
    behind: list[int]
    owner: Owner


class PlainMemory:
    """Segments by serial, and cells by bucket and way."""

    def __init__(self, size: int, requests: int) -> None:
        self.size, self.buckets, self.head = size, size * SEGMENT * len(LENGTHS) // WAYS, 1
        self.requests, self.begun = requests, 0
        self.segments: dict[int, Segment] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.writers: dict[int, Writer] = {}

    def begin(self, slot: int, owner: Owner, first: int) -> None:
        self.begun += 1
        self.writers[slot] = Writer(owner, self.begun, first, first)

    def write(self, texts: dict[int, list[int]], slots: Sequence[int]) -> None:
        """Add at most a segment of each text, in the batch's order."""
        first, added = self.head, []
        for slot in slots:
            if slot < 0 or self.writers[slot].owner.scope == 0:
                continue
            writer = self.writers[slot]
            tokens = texts[slot][writer.done : writer.done + SEGMENT]
            if not tokens:
                continue
            last = writer.last
            if last is None or last.serial < first + self.requests - self.size:
                last, writer.begin = None, writer.done
            new = None
            if last is None or len(last.tokens) + len(tokens) > SEGMENT:
                new = Segment(writer.owner, writer.number, last, serial=self.head)
                self.head += 1
                if last is not None:
                    last.behind = new
            added.append((writer, texts[slot], tokens, last, new))
        for writer, text, tokens, last, new in added:
            if new is not None:
                self.segments[new.serial] = new
            for number, token in enumerate(tokens, start=writer.done):
                into = last if last is not None and len(last.tokens) < SEGMENT else new
                assert into is not None
                address = into.serial * SEGMENT + len(into.tokens)
                into.tokens.append(token)
                for index, length in enumerate(LENGTHS):
                    if number - length >= writer.begin:
                        self._put(writer.owner, index, text[number - length : number], address)
            writer.done += len(tokens)
            writer.last = new or last
        self.segments = {s: each for s, each in self.segments.items() if s >= self.oldest}

    def _put(self, owner: Owner, index: int, before: list[int], address: int) -> None:
        bucket = _hash(owner, index, before) % self.buckets
        way = address // SEGMENT % WAYS
        self.cells[bucket, way] = max(address, self.cells.get((bucket, way), 0))

    @property
    def oldest(self) -> int:
        return self.head - self.size

    def tokens_before(self, address: int) -> list[int]:
        """The tokens of an address's segment before it, and those of the segment before that."""
        segment = self.segments[address // SEGMENT]
        before = segment.before
        known = before.tokens if before is not None and before.serial >= self.oldest else []
        return known + segment.tokens[: address % SEGMENT]

    def tokens_behind(self, address: int) -> list[int]:
        segment = self.segments[address // SEGMENT]
        more = segment.behind.tokens if segment.behind is not None else []
        return segment.tokens[address % SEGMENT :] + more

    def search(self, slot: int, text: list[int], min_n: int, max_n: int) -> list[Found]:
        """Return the matches of the end of a text in others, each once."""
        owner, number = self.writers[slot].owner, self.writers[slot].number
        seen, found = set(), []
        if owner == NOBODY:
            return []
        for index, length in enumerate(LENGTHS):
            if length > len(text):
                continue
            bucket = _hash(owner, index, text[-length:]) % self.buckets
            alike: list[tuple[int, int]] = []
            for way in range(WAYS):
                address = self.cells.get((bucket, way), 0)
                if (segment := self.segments.get(address // SEGMENT)) is None:
                    continue
                if segment.owner.scope != owner.scope or segment.number == number:
                    continue
                if index == SAME_PROMPT and segment.owner.prompt != owner.prompt:
                    continue
                before = self.tokens_before(address)
                n = 0
                while n < min(max_n, len(before), len(text)) and before[-1 - n] == text[-1 - n]:
                    n += 1
                if n >= (1 if index == SAME_PROMPT else max(min(length, max_n), min_n)):
                    alike.append((address, n))
            nexts = [self.tokens_behind(address)[0] for address, _ in alike]
            for (address, n), token in zip(alike, nexts, strict=True):
                if address not in seen:
                    seen.add(address)
                    kind = _kind(n, nexts.count(token), len(nexts))
                    segment = self.segments[address // SEGMENT]
                    kind += 16 * (segment.owner.prompt == owner.prompt)
                    place = address // SEGMENT % self.size * SEGMENT + address % SEGMENT
                    found.append(Found(kind, place, self.tokens_behind(address), segment.owner))
        return found


def _kind(n: int, alike: int, count: int) -> int:
    share = (3 * alike >= count) + (3 * alike >= 2 * count)
    share += 3 * alike >= 2 * count and alike >= 3
    return 1 + share + 4 * ((n >= 3) + (n >= 5) + (n >= 8))


def begin_of(prompt: Sequence[int]) -> int:
    """The first token of a text that is kept."""
    return max(0, len(prompt) - LONGEST)
