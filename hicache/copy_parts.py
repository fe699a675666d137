"""What of an operation is copied in which way, until the device has done it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_graft.hicache.copy_engine import CopyResult
from vllm_graft.hicache.layout import Copies
from vllm_graft.hicache.operation import CacheOperation
from vllm_graft.hicache.strided import StridedCopies


@dataclass(frozen=True)
class Part:
    """Copies of an operation that go the same way.

    Attributes:
        copied: the copies.
        copy: enqueues a range of them.
        ranges: by name, each layer's; empty if nobody needs them.
    """

    copied: Copies | StridedCopies
    copy: Callable[[int, int], None]
    ranges: Mapping[str, tuple[int, int]]

    def enqueue(self, layers: Iterable[str]) -> None:
        """Enqueue the copies of some layers."""
        for begin, end in _joined(self.ranges[name] for name in layers if name in self.ranges):
            self.copy(begin, end)


@dataclass
class InFlight:
    """A submitted operation, between two events."""

    operation: CacheOperation
    start: Any
    end: Any
    copied: list[Part]
    """With descriptors, until the driver is done with them."""

    def result(self) -> CopyResult:
        """Once it has ended."""
        copied = [part.copied for part in self.copied]
        strided = sum(part.num_bytes for part in copied if isinstance(part, StridedCopies))
        seconds = self.start.elapsed_time(self.end) * 1e-3
        num_bytes = sum(part.num_bytes for part in copied)
        return CopyResult(self.operation, num_bytes, strided, seconds)


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same ranges; neighbours have become one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined
