"""Profile where the device's time of a step goes, in either engine of `benchmarks.bars`.

Functions for `LLM.collective_rpc`. A step is replays of CUDA graphs (the target, the draft's extend
pass, its levels or its chain) and what is launched one by one between them (the output head,
sampling, verification, inputs). The profiler knows each kernel's launch, so that kernels of a graph
are told from the others, and how long the host was in each call of CUDA's, which may wait. It makes
steps longer: compare sums of kernels, not spans, with a step that is not profiled.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.bars import kernel_times as kernels

SKIPPED, PROFILED = 6, 9
"""How many steps are skipped at the beginning, and how many are profiled after them."""

MOST_KERNELS, MOST_CALLS = 12, 6


class Launch(NamedTuple):
    """A kernel or copy on the device: microseconds, and its graph launch, if it has one."""

    name: str
    start: float
    end: float
    graph: int | None


@dataclass(frozen=True)
class Section:
    """A part of a step: one replay, or all that runs before the next one.

    Attributes:
        name: `graph 0` is the target's.
        span: microseconds from its beginning to that of the next section.
        busy: how many of these microseconds a kernel ran in.
        launches: kernels and copies.
    """

    name: str
    span: float
    busy: float
    launches: int


class Watch:
    """Profile the next steps of a model runner."""

    def __init__(self, runner: Any) -> None:
        self.launches: list[Launch] = []
        self.calls: list[tuple[str, float]] = []
        self._runner, self._steps = runner, 0
        self._profile: Any = None
        self._run: Callable[..., Any] = runner.execute_model
        runner.execute_model = self._step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._steps += 1
        if self._steps == SKIPPED:
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        elif self._steps == SKIPPED + PROFILED:
            torch.cuda.synchronize()
            self._profile.stop()
            events = list(self._profile.events() or ())
            self.launches, self.calls = launches(events), calls(events)
        return self._run(*args, **kwargs)

    def end(self) -> None:
        """Stop watching the runner."""
        del self._runner.execute_model


_watching: list[Watch] = []


def watch_steps(worker: Any) -> None:
    """Begin to profile, where there is a CUDA device."""
    runner = worker.model_runner
    if runner.device.type == "cuda":
        _watching.append(Watch(runner))


def step_lines(worker: Any) -> list[str]:
    """Stop, and return lines of the sections and of kernels outside of graphs; empty for none."""
    if not _watching:
        return []
    watch = _watching.pop()
    watch.end()
    return lines(watch.launches, watch.calls)


def calls(events: Iterable[Any]) -> list[tuple[str, float]]:
    """Take calls of CUDA, and the host's microseconds in each, from a profiler's events."""
    from torch.autograd import DeviceType

    return [
        (event.name, event.time_range.elapsed_us())
        for event in events
        if event.device_type == DeviceType.CPU and event.name.startswith("cu")
    ]


def launches(events: Sequence[Any]) -> list[Launch]:
    """Take kernels and copies, in the device's order, from a profiler's events."""
    graphs = {event.id for event in events if event.name.startswith("cudaGraphLaunch")}
    found = [
        Launch(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.id if event.id in graphs else None,
        )
        for event in kernels.on_device(events)
    ]
    return sorted(found, key=lambda launch: launch.start)


def split(found: Sequence[Launch]) -> list[list[list[Launch]]]:
    """Split launches into whole steps, each a list of sections: a replay, what follows it, ...

    The target's graph is the one whose kernels take longest; a step begins with it.
    """
    parts: list[list[Launch]] = []
    for launch in found:
        if not parts or parts[-1][-1].graph != launch.graph:
            parts.append([])
        parts[-1].append(launch)
    longest = max((_busy(part) for part in parts if part[0].graph is not None), default=0.0)
    steps: list[list[list[Launch]]] = []
    for part in parts:
        if part[0].graph is not None and _busy(part) > longest / 2:
            steps.append([])
        if steps:
            steps[-1].append(part)
    # The last step may have been cut off.
    return steps[:-1]


def sections(steps: Sequence[Sequence[Sequence[Launch]]]) -> list[Section]:
    """Compute medians over the steps that have the most frequent number of sections."""
    usual = statistics.mode(len(step) for step in steps)
    kept = [(at, step) for at, step in enumerate(steps[:-1]) if len(step) == usual]
    columns: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for at, step in kept:
        following = [*step[1:], steps[at + 1][0]]
        for number, (part, after) in enumerate(zip(step, following, strict=True)):
            columns[number].append((after[0].start - part[0].start, _busy(part), len(part)))
    found, graphs = [], 0
    for number, rows in columns.items():
        is_graph = kept[0][1][number][0].graph is not None
        name = f"graph {graphs}" if is_graph else "between"
        graphs += is_graph
        spans, busy, counts = zip(*rows, strict=True)
        medians = (statistics.median(each) for each in (spans, busy, counts))
        found.append(Section(name, *medians))
    return found


def lines(found: Sequence[Launch], asked: Sequence[tuple[str, float]] = ()) -> list[str]:
    """Lay out a line per section, their sum, the longest kernels outside of graphs, and calls.

    All figures are per step."""
    steps = split(found)
    if len(steps) < 2:
        return [f"no two steps among {len(found)} launches"]
    parts = sections(steps)
    span, busy = (sum(getattr(part, name) for part in parts) for name in ("span", "busy"))
    shown = [
        f"{part.busy:9.1f} us of {part.span:9.1f} {part.launches:5.0f} launches  {part.name}"
        for part in (*parts, Section("a step", span, busy, sum(p.launches for p in parts)))
    ]
    alone = [
        (launch.name, (launch.end - launch.start) / len(steps))
        for step in steps
        for part in step
        for launch in part
        if launch.graph is None
    ]
    per_step = [(name, microseconds / PROFILED) for name, microseconds in asked]
    return [
        *shown,
        *kernels.lines(kernels.by_name(alone), MOST_KERNELS),
        *kernels.lines(kernels.by_name(per_step), MOST_CALLS),
    ]


def _busy(part: Sequence[Launch]) -> float:
    """Return microseconds in which at least one of the launches, which are in order, ran."""
    busy, until = 0.0, float("-inf")
    for launch in part:
        busy += max(0.0, launch.end - max(launch.start, until))
        until = max(until, launch.end)
    return busy
