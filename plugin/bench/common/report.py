"""What a benchmark writes: JSON files, plots, and how much of its time is left."""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vllm_graft.base.errors import GraftError


class BenchmarkError(GraftError):
    """A benchmark cannot do what it was asked for."""


def exit_status(name: str, work: Callable[[], int | None]) -> int:
    """Run a benchmark; a `BenchmarkError` is one line that begins with `name`, not a traceback."""
    try:
        return work() or 0
    except BenchmarkError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


def positive(text: str) -> int:
    """Read a flag's number, from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1 on")
    return int(text)


def write_json(file: str, values: Any, quiet: bool = False) -> None:
    """Write ``values`` and, unless told not to, say where."""
    Path(file).write_text(json.dumps(values, indent=1, default=str) + "\n")
    if not quiet:
        print(f"wrote {file}", flush=True)


def require_folder(flag: str, file: str | None) -> None:
    """Refuse a file that could not be written after the run."""
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise BenchmarkError(f"{flag} {file}: the folder does not exist; make it, or name another.")


@dataclass(frozen=True)
class Panel:
    """One diagram: a line of points (x, y) for each series, by its name, over the same axis.
    ``log`` are the axes with a logarithmic scale: any of ``"x"``, ``"y"``, ``"xy"``, or ``""``."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log: str = ""


def require_plotting(file: str | None) -> None:
    """Refuse ``--plot`` before anything is measured where matplotlib is not installed."""
    if file is not None and importlib.util.find_spec("matplotlib") is None:
        raise BenchmarkError(
            f"--plot {file}: matplotlib is not installed. Run pip install 'vllm-graft[bench]', or "
            "leave --plot away."
        )


def plot(file: str, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side; the suffix of ``file`` chooses the format."""
    require_plotting(file)
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(5.5 * max(1, len(panels)), 4), layout="constrained")
    for number, panel in enumerate(panels, start=1):
        axes: Any = figure.add_subplot(1, len(panels), number)
        for name, points in panel.series.items():
            ordered = sorted(points)
            axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", label=name)
        if "x" in panel.log:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for points in panel.series.values() for x, _ in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        if "y" in panel.log:
            axes.set_yscale("log")
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file)
    print(f"wrote {file}", flush=True)


T = TypeVar("T")


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the limit."""
    told = "begin nothing that would end later, but a first measurement (default: no limit)"
    parser.add_argument("--seconds", type=float, metavar="S", help=told)


class TimeLimit:
    """A limit in seconds from now on, None for none, of engines that run one after another."""

    def __init__(self, seconds: float | None, engines: int = 1) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._share, self._engines, self._least = self._end, engines, 1

    def within(self, cases: Sequence[T]) -> Iterator[T]:
        """The cases of the next engine, as long as the next one would end in the engine's share;
        but the first one of the first engine is measured however long its start took. Each says on
        standard error how many there are, and how long all may take."""
        began, longest = time.perf_counter(), 0.0
        if self._end is not None:
            self._share = began + (self._end - began) / self._engines
        self._engines -= 1
        least, self._least = self._least, 0
        for number, case in enumerate(cases):
            start = time.perf_counter()
            if number >= least and self._is_late(start + longest):
                _say(f"no time left for {len(cases) - number} of {len(cases)} measurements")
                return
            yield case
            longest = max(longest, time.perf_counter() - start)
            each = (time.perf_counter() - began) / (number + 1)
            left = each * (len(cases) - number - 1 + len(cases) * self._engines)
            after = f", {self._engines} more engines" if self._engines else ""
            _say(f"{number + 1} of {len(cases)} measured{after}: about {_clock(left)} left")

    def rounds(self, count: int, least: int) -> Iterator[int]:
        """The numbers of the rounds of a case: `least` of them, and others as long as the next one
        would end in the engine's share."""
        start, longest = time.perf_counter(), 0.0
        for number in range(count):
            if number >= least and self._is_late(start + longest):
                _say(f"no time left for {count - number} of {count} rounds")
                return
            yield number
            now = time.perf_counter()
            start, longest = now, max(longest, now - start)

    def _is_late(self, end: float) -> bool:
        """Whether what ends then is beyond the engine's share."""
        return self._share is not None and end > self._share


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
