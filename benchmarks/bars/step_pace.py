"""How fast an engine's steps follow each other in a window, by kind of step.

Functions for `LLM.collective_rpc`, in stock's engine and ours alike: the scheduler is told the
tokens of a step once the device has them, so the time from one such call to the next is the
device's for that step wherever the host keeps ahead.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.node_counts import calling_core

FULL, PROMPTS, FEWER, BARE, TURN = "full", "prompts", "fewer", "bare", "turn"
"""Kinds of steps: decodes of the whole batch, with a prompt among them, decodes of fewer, decodes
of the whole batch without drafts, and one of either kind right behind one of the other."""


class Pace(NamedTuple):
    """A step: its kind, seconds since the tokens of the step before, rows, tokens emitted."""

    kind: str
    seconds: float
    rows: int
    tokens: int


def kind_of(scheduled: Any, batch: int) -> str:
    """Return the kind of a step that the scheduler planned; a whole batch is `batch` requests."""
    drafts = scheduled.scheduled_spec_decode_tokens
    counts = scheduled.num_scheduled_tokens
    if scheduled.scheduled_new_reqs or any(
        count != 1 + len(drafts.get(name, ())) for name, count in counts.items()
    ):
        return PROMPTS
    if len(counts) != batch:
        return FEWER
    return FULL if drafts else BARE


_watching: list[tuple[contextlib.ExitStack, list[Pace]]] = []


def watch_pace(worker: Any, batch: int) -> None:
    """Begin to watch steps, if there is a scheduler; `batch` requests make a full step."""
    stack, steps = contextlib.ExitStack(), list[Pace]()
    _watching.append((stack, steps))
    if (scheduler := getattr(calling_core(), "scheduler", None)) is None:
        return
    told, last, decoded = scheduler.update_from_output, time.perf_counter(), ""

    def update(scheduled: Any, output: Any, *rest: Any, **named: Any) -> Any:
        nonlocal last, decoded
        before, last = last, time.perf_counter()
        if rows := scheduled.total_num_scheduled_tokens:
            tokens, kind = sum(map(len, output.sampled_token_ids)), kind_of(scheduled, batch)
            turns, decoded = {kind, decoded} == {FULL, BARE}, kind
            steps.append(Pace(TURN if turns else kind, last - before, rows, tokens))
        return told(scheduled, output, *rest, **named)

    stack.enter_context(mock.patch.object(scheduler, "update_from_output", update))


def paces(worker: Any) -> dict[str, dict[str, float]]:
    """Stop watching, and return the summary."""
    stack, found = _watching.pop()
    stack.close()
    return summary(found)


def summary(steps: Sequence[Pace]) -> dict[str, dict[str, float]]:
    """Summarise the steps by kind.

    Returns:
        `steps`; `time`, their share of all time; `ms`, the median, and `mean_ms`; `rows` and
        `tokens`, means per step.
    """
    kinds: dict[str, list[Pace]] = defaultdict(list)
    for step in steps:
        kinds[step.kind].append(step)
    total = sum(step.seconds for step in steps)
    order = (FULL, BARE, TURN, PROMPTS, FEWER)
    return {kind: _of(kinds[kind], total) for kind in order if kind in kinds}


def line(found: Mapping[str, Mapping[str, float]]) -> str:
    """Format: ``full 120 steps 70 % 7.10 ms (7.02) 32 rows 60.1 tokens, prompts ...``; the median
    is in brackets."""
    return ", ".join(
        f"{kind} {of['steps']:.0f} steps {100 * of['time']:.0f} % {of['mean_ms']:.2f} ms "
        f"({of['ms']:.2f}) {of['rows']:.0f} rows {of['tokens']:.1f} tokens"
        for kind, of in found.items()
    )


def _of(steps: Sequence[Pace], total: float) -> dict[str, float]:
    seconds = [step.seconds for step in steps]
    return {
        "steps": len(steps),
        "time": round(sum(seconds) / total, 3) if total else 0.0,
        "ms": round(1e3 * statistics.median(seconds), 3),
        "mean_ms": round(1e3 * statistics.mean(seconds), 3),
        "rows": round(statistics.mean(step.rows for step in steps), 1),
        "tokens": round(statistics.mean(step.tokens for step in steps), 1),
    }
