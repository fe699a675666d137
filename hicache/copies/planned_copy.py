"""One operation's copies, grouped by method, and kept alive until the device has made them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_graft.hicache.copies.copy_engine import CopyResult
from vllm_graft.hicache.copies.staged_plan import StagedCopies
from vllm_graft.hicache.copies.strided import StridedCopies
from vllm_graft.hicache.messages.operation import CacheOperation
from vllm_graft.hicache.pages.layout import Copies


@dataclass(frozen=True)
class PlannedCopy:
    """Copies of an operation that are made by the same method.

    Attributes:
        copied: the copies.
        copy: ``(begin, end)``: enqueues a range of the copies.
        ranges: range ``(begin, end)`` of the copies of each layer, by its name. Empty if the layers
            are not copied one by one.
    """

    copied: Copies | StridedCopies | StagedCopies
    copy: Callable[[int, int], None]
    ranges: Mapping[str, tuple[int, int]]

    def enqueue(self, layers: Iterable[str]) -> None:
        """Enqueue the copies of the named layers."""
        for begin, end in _joined(self.ranges[name] for name in layers if name in self.ranges):
            self.copy(begin, end)


@dataclass
class InFlight:
    """A submitted operation, between two timed events."""

    operation: CacheOperation
    start: Any
    end: Any
    copied: list[PlannedCopy]
    """The copies, which hold the driver's descriptors until the operation has ended."""

    def result(self) -> CopyResult:
        """The result of the operation. Call it only after the operation has ended."""
        return CopyResult(
            self.operation,
            num_bytes=sum(copy.copied.num_bytes for copy in self.copied),
            strided_bytes=self._bytes_by(StridedCopies),
            staged_bytes=self._bytes_by(StagedCopies),
            seconds=self.start.elapsed_time(self.end) * 1e-3,
        )

    def _bytes_by(self, kind: type) -> int:
        return sum(copy.copied.num_bytes for copy in self.copied if isinstance(copy.copied, kind))


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges, with neighbours merged into one."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined
