"""Numbers of nodes that `shape: auto` chose in a window, with their steps' time and tokens.

Functions for `LLM.collective_rpc`, in our engine; they find the tuner in the worker's process.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Nodes = dict[int, dict[str, float]]
"""Figures of each number of nodes, seen and expected."""


def calling_core() -> Any:
    """The engine core among the callers of a function that runs in a worker; None without one.

    Without tensor parallelism it runs in the worker's process. Only a benchmark may look for it.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "scheduler", None) is not None:
            return caller
        frame = frame.f_back
    return None


def calling_tuner() -> Any:
    """The tuner of ``shape: auto`` among the callers; None without one."""
    table = getattr(getattr(calling_core(), "scheduler", None), "dynamic_sd_lookup", None)
    return getattr(table, "tuner", None)


class Step(NamedTuple):
    """A step as the tuner was told: nodes, requests, their tokens, seconds if known, prompts."""

    nodes: int
    requests: int
    tokens: int
    seconds: float | None
    prompts: bool


class Watch:
    """Listens to what one tuner is told until `end`."""

    def __init__(self, tuner: Any) -> None:
        self.steps: list[Step] = []
        self._tuner = tuner
        told = tuner.observe

        def observe(nodes: int, emitted: Sequence[int], seconds: float | None, **rest: Any) -> None:
            prompts = bool(rest.get("prompts"))
            self.steps.append(Step(nodes, len(emitted), sum(emitted), seconds, prompts))
            told(nodes, emitted, seconds, **rest)

        tuner.observe = observe

    def end(self) -> Any:
        del self._tuner.observe
        return self._tuner


_watching: list[Watch] = []


def watch_nodes(worker: Any) -> None:
    """Begin to watch the tuner, if there is one."""
    if (tuner := calling_tuner()) is not None:
        _watching.append(Watch(tuner))


def nodes_used(worker: Any, batch: int) -> Nodes:
    """Stop watching; return the summary, and what the tuner now expects in batches of this size."""
    if not _watching:
        return {}
    watch = _watching.pop()
    expected = watch.end().expected(batch)
    found = summary(watch.steps)
    return {nodes: found.get(nodes, {}) | expected.get(nodes, {}) for nodes in found | expected}


def summary(steps: Sequence[Step]) -> Nodes:
    """Summarise the steps by number of nodes, the most frequent first.

    Returns:
        `share` of all steps; `length`, tokens per request; `prompts`, the share of these steps that
        had prompts; `ms` and `ms_prompts`, medians of steps without and with them, where timed.
    """
    found: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        found[step.nodes].append(step)
    return {
        nodes: _of(found[nodes], len(steps))
        for nodes in sorted(found, key=lambda nodes: -len(found[nodes]))
    }


def _of(steps: Sequence[Step], total: int) -> dict[str, float]:
    values = {
        "share": len(steps) / total,
        "length": sum(step.tokens for step in steps) / sum(step.requests for step in steps),
        "prompts": sum(step.prompts for step in steps) / len(steps),
    }
    for name, prompts in (("ms", False), ("ms_prompts", True)):
        times = [s.seconds for s in steps if s.prompts is prompts and s.seconds is not None]
        if times:
            values[name] = 1e3 * statistics.median(times)
    return {name: round(value, 3) for name, value in values.items()}


def line(nodes: Mapping[int, Mapping[str, float]], most: int = 3) -> str:
    """Format: ``nodes 31 70 % 5.61 in 9.2 ms, 15 30 % 4.58 in 7.6 ms``; empty for none."""
    parts = []
    used = [(number, of) for number, of in nodes.items() if "share" in of]
    for number, of in used[:most]:
        milliseconds = of.get("ms", of.get("ms_prompts"))
        timed = "" if milliseconds is None else f" in {milliseconds:.1f} ms"
        parts.append(f"{number} {100 * of['share']:.0f} % {of['length']:.2f}{timed}")
    return f"nodes {', '.join(parts)}" if parts else ""
