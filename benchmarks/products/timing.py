"""Times launches in CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

Launches = Callable[[], object]

COPY_BYTES = 1 << 30


class Clock(Protocol):
    """Times launches; tests pretend one."""

    def captured(self, launches: Launches) -> Launches:
        """A call that does what launches do, in a graph."""

    def time(self, launches: Launches, repeats: int) -> float:
        """Microseconds of launches: the median of so many repeats."""

    def compare(self, arms: Mapping[str, Launches], rounds: int) -> dict[str, float]:
        """Median microseconds of each arm, all arms in turn in each round."""


class GraphClock:
    """Times CUDA graphs by events.

    Args:
        replays: of a graph between two events, one right after the other.
    """

    def __init__(self, replays: int = 4) -> None:
        self._replays = replays
        self._stream = torch.cuda.Stream()

    def capture(self, launches: Launches) -> torch.cuda.CUDAGraph:
        """Run launches once, and capture them."""
        graph = torch.cuda.CUDAGraph()
        # This stream does not wait for what others have begun to write.
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            launches()
            torch.cuda.synchronize()
            # torch.cuda.graph would collect garbage before each of thousands of captures.
            graph.capture_begin()
            try:
                launches()
            finally:
                graph.capture_end()
        return graph

    def captured(self, launches: Launches) -> Launches:
        """A call that does what launches do, in a graph."""
        graph = self.capture(launches)
        return lambda: graph.replay()

    def time(self, launches: Launches, repeats: int) -> float:
        """Microseconds of launches: the median of so many repeats."""
        graph = self.capture(launches)
        self._once(graph)
        return statistics.median(self._once(graph) for _ in range(repeats))

    def compare(self, arms: Mapping[str, Launches], rounds: int) -> dict[str, float]:
        """Median microseconds of each arm, all arms in turn in each round."""
        graphs = {name: self.capture(launches) for name, launches in arms.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for number in range(rounds + 1):
            for name, graph in graphs.items():
                taken = self._once(graph)
                if number:
                    times[name].append(taken)
        return {name: statistics.median(each) for name, each in times.items()}

    def _once(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            # The first replay's launch is not hidden behind another.
            graph.replay()
            begin.record()
            for _ in range(self._replays):
                graph.replay()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / self._replays


def copy_rate(clock: Clock, device: str, size: int = COPY_BYTES) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.time(lambda: target.copy_(source), 15) * 1e6
