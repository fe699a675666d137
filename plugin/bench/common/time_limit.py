"""The time that a benchmark has, and what is left of it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def add_seconds(parser: argparse.ArgumentParser) -> None:
    """Add the flag of the limit."""
    told = "begin no measurement that would end later than this (default: no limit)"
    parser.add_argument("--seconds", type=float, metavar="S", help=told)


class TimeLimit:
    """A limit in seconds from now on, None for none, of engines that run one after another."""

    def __init__(self, seconds: float | None, engines: int = 1) -> None:
        self._end = None if seconds is None else time.perf_counter() + seconds
        self._engines = engines

    def within(self, cases: Sequence[T]) -> Iterator[T]:
        """The cases of the next engine, as long as the next one would end in the engine's share.

        Each says on standard error how many there are, and how long all may take.
        """
        began, longest = time.perf_counter(), 0.0
        share = None if self._end is None else began + (self._end - began) / self._engines
        self._engines -= 1
        for number, case in enumerate(cases):
            start = time.perf_counter()
            if share is not None and start + longest > share:
                _say(f"no time left for {len(cases) - number} of {len(cases)} measurements")
                return
            yield case
            longest = max(longest, time.perf_counter() - start)
            each = (time.perf_counter() - began) / (number + 1)
            left = each * (len(cases) - number - 1 + len(cases) * self._engines)
            after = f", {self._engines} more engines" if self._engines else ""
            _say(f"{number + 1} of {len(cases)} measured{after}: about {_clock(left)} left")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
