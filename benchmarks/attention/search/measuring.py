"""Times the plans of one problem, and checks what each computes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.attention import own_calls
from benchmarks.attention.platform_calls import Calls, yardsticks
from benchmarks.attention.rows import Timer, in_turn, one_line
from benchmarks.attention.search.candidates import plain, short
from benchmarks.attention.search.compiling import Built, outcome
from benchmarks.attention.search.points import Batch, Problem
from benchmarks.attention.shapes import DTYPE, moved_bytes
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Sizes
from vllm_graft.spec_decode.kernels.attention.tree_attention import (
    draft_attention,
    tree_attention,
)
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.kernels.listed_launch import Launch, listing
from vllm_graft.spec_decode.kernels.sizes import next_power_of_2
from vllm_graft.spec_decode.targets.dense.plain_attention import (
    draft_attention_reference,
    tree_attention_reference,
)
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

RELATIVE = 2e-2
"""Largest norm of the error of a row and head, over that of the row: rounding to bfloat16."""


@dataclass
class Timing:
    """What was measured of a plan.

    Attributes:
        plan: the plan.
        us: microseconds of a call, combination included; None if it did not run.
        again: the same, measured once more with more repeats; None if it was not.
        error: largest relative error of a row and head.
        failure: why it did not run, or what it computes wrongly.
        built: what its kernels take.
    """

    plan: Plan
    us: float | None = None
    again: float | None = None
    error: float | None = None
    failure: str = ""
    built: list[Built] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The better known time; infinite if it did not run or is wrong."""
        if self.failure or self.us is None:
            return float("inf")
        return self.us if self.again is None else self.again

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "us": self.us,
            "again": self.again,
            "error": self.error,
            "plan": plain(self.plan),
            "short": short(self.plan),
            **({"failure": self.failure} if self.failure else {}),
            "built": [each.plain() for each in self.built],
        }


@dataclass
class Found:
    """What was measured of a problem.

    Attributes:
        problem: the problem.
        copied: microseconds in which a large copy moves what has to be moved.
        today: today's rule.
        timings: all plans.
        others: times of the platform's kernel for a chain, and of our two passes.
        failures: errors of these.
    """

    problem: Problem
    copied: float = 0.0
    today: Timing | None = None
    timings: list[Timing] = field(default_factory=list)
    others: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def ranked(self) -> list[Timing]:
        """Timings of plans that compute rightly, the fastest first."""
        right = [each for each in self.timings if each.best < float("inf")]
        return sorted(right, key=lambda each: each.best)

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        problem = self.problem
        return {
            "name": problem.name,
            "layer": problem.layer.name,
            "num_reqs": problem.num_reqs,
            "rows": problem.rows,
            "context": problem.context,
            "draft": problem.draft,
            "copied": self.copied,
            "today": self.today.plain() if self.today else None,
            "others": self.others,
            "failures": self.failures,
            "timings": [each.plain() for each in self.ranked()],
            "wrong": [each.plain() for each in self.timings if each.best == float("inf")],
        }


def sizes_of(problem: Problem, space: AttentionWorkspace, longest: int) -> Sizes:
    """What the choice of plans looks at: a graph's bound of the keys, not their number."""
    layer = problem.layer
    pairs = space.num_pairs(problem.rows, layer.heads, layer.head_size)
    room = pairs - problem.num_reqs if problem.draft else pairs
    return Sizes(
        rows=problem.rows * layer.heads // layer.kv_heads,
        head=max(16, next_power_of_2(layer.head_size)),
        dtype=DTYPE,
        num_reqs=problem.num_reqs,
        kv_heads=layer.kv_heads,
        keys=layer.keys(problem.rows, max(longest, problem.context)),
        window=layer.window > 0,
        draft=problem.draft,
        most_splits=max(1, room // problem.num_reqs),
        multiprocessors=space.multiprocessors,
        capability=space.capability,
    )


def attend(batch: Batch, out: torch.Tensor, space: AttentionWorkspace, plan: Plan) -> None:
    """Compute a batch by a plan."""
    if isinstance(batch, DraftBatch):
        draft_attention(batch, out, workspace=space, plan=plan)
    else:
        tree_attention(batch, out, workspace=space, plan=plan)


def launches_of(batch: Batch, space: AttentionWorkspace, plan: Plan) -> list[Launch]:
    """The kernels that a plan needs, without a launch."""
    found: list[Launch] = []
    out = torch.empty(batch.query.shape, dtype=batch.query.dtype, device=batch.query.device)
    with listing(found.append):
        attend(batch, out, space, plan)
    return found


def expected_of(batch: Batch) -> torch.Tensor:
    """What a plan has to compute, by float32."""
    out = torch.zeros(batch.query.shape, device=batch.query.device)
    if isinstance(batch, DraftBatch):
        draft_attention_reference(batch, out)
    else:
        tree_attention_reference(batch, out)
    return out


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest norm of the error of a row and head, over that of the row; NaN stays NaN."""
    return float(((out.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


class Bench:
    """Times plans over the batches of one problem.

    Args:
        batches: batches that differ in their blocks.
        space: the workspace.
        timer: times a call.
    """

    def __init__(self, batches: Sequence[Batch], space: AttentionWorkspace, timer: Timer) -> None:
        self._batches, self._space, self._timer = batches, space, timer
        query = batches[0].query
        self._out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._expected = expected_of(batches[0])

    def time(self, plan: Plan, timer: Timer | None = None) -> float:
        """Microseconds of a call by a plan, each call over other blocks."""
        calls = [
            functools.partial(attend, batch, self._out, self._space, plan)
            for batch in self._batches
        ]
        return (timer or self._timer)(in_turn(calls))

    def measure(self, plan: Plan, built: Sequence[Future[Built]] = ()) -> Timing:
        """Time a plan, once its kernels are compiled, and check what it computes."""
        timing = Timing(plan, built=[outcome(each) for each in built])
        if wrong := [each.error for each in timing.built if each.error]:
            timing.failure = wrong[0]
            return timing
        try:
            self._out.fill_(float("nan"))
            attend(self._batches[0], self._out, self._space, plan)
            timing.error = error_of(self._out, self._expected)
            if not timing.error <= RELATIVE:
                timing.failure = f"relative error {timing.error:.4f}"
                return timing
            timing.us = self.time(plan)
        except Exception as error:  # Any error of a kernel is a line of the report.
            timing.failure = one_line(error)
        return timing


def time_others(
    found: Found, batches: Sequence[Batch], space: AttentionWorkspace, longest: int, timer: Timer
) -> None:
    """Time the platform's kernel over a chain of as many rows, and our two passes over trees."""
    trees = [batch for batch in batches if isinstance(batch, TreeBatch)]
    if not trees:
        return
    problem = found.problem
    flash = yardsticks(problem.layer)[0]
    makers: dict[str, Callable[[], Calls]] = {
        flash.name: lambda: flash.make(trees, problem.rows, longest)
    }
    if not problem.layer.window:
        makers["two passes"] = lambda: own_calls.two_pass(trees, space, longest)
    for name, make in makers.items():
        try:
            found.others[name] = timer(in_turn(make()))
        except Exception as error:  # A kernel that does not serve a size is a line of the report.
            found.failures[name] = one_line(error)


def copied_us(problem: Problem, copy_rate: float) -> float:
    """Microseconds in which a large copy moves what has to be moved; 0 if its rate is unknown."""
    moved = moved_bytes(problem.layer, problem.num_reqs, problem.rows, problem.context)
    return moved / copy_rate * 1e6 if copy_rate else 0.0
