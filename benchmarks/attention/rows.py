"""A line of the table: our kernel beside the platform's, over the same rows and keys."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from benchmarks.attention import own_calls
from benchmarks.attention.platform_calls import Calls, yardsticks
from benchmarks.attention.problems import chain_of, problems
from benchmarks.attention.shapes import LatentLayer, Layer, moved_bytes
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.two_pass import Costs, Point, choose
from vllm_graft.spec_decode.tuning.attention_timing import graph_time

CALLS = 10
TOLERANCE = 0.1
"""Largest difference of outputs that rounding to bfloat16 explains, in standard deviations of an
output: over many keys outputs are small."""

Timer = Callable[[Callable[[], object]], float]
"""Returns the microseconds of a call."""


def in_turn(calls: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """A call of the next one each time, so that calls in a row differ in what they read."""
    around = itertools.cycle(calls)
    return lambda: next(around)()


def one_line(error: Exception) -> str:
    """What a table says of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@dataclass
class Row:
    """What was measured of one layer at one size; times are microseconds per call.

    Attributes:
        shape: the model.
        layer: the kind of its layer.
        batch: requests.
        context: keys of each request, its tree's among them.
        own: our kernels' times over the trees.
        chosen: which of them an engine takes.
        platform: the platform's kernels' times over chains of as many rows, in vLLM's order.
        one_row: times of the same over one row per request.
        failures: errors of kernels that did not run, the platform's and ours.
        differences: largest difference of our output over chains from the platform's, in standard
            deviations of the output.
        bytes: what has to be moved for the rows.
        copied: microseconds in which a large copy moves as much; 0 where the rate is unknown.
    """

    shape: str
    layer: str
    batch: int
    context: int
    own: dict[str, float] = field(default_factory=dict)
    chosen: str = ""
    platform: dict[str, float] = field(default_factory=dict)
    one_row: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    copied: float = 0.0

    @property
    def ours(self) -> float | None:
        """The time of the kernel that an engine takes; None where it did not run."""
        return self.own.get(self.chosen)

    @property
    def taken(self) -> str:
        """The platform's kernel that vLLM takes: the first that runs; empty if none does."""
        return next(iter(self.platform), "")

    @property
    def ratio(self) -> float | None:
        """Our time over that of the platform's kernel; None where either did not run."""
        theirs = self.platform.get(self.taken)
        return None if self.ours is None or theirs is None else self.ours / theirs

    @property
    def ratio_of_best(self) -> float | None:
        """Our time over that of the fastest of the platform's kernels."""
        theirs = min(self.platform.values(), default=None)
        return None if self.ours is None or theirs is None else self.ours / theirs

    @property
    def share(self) -> float | None:
        """The share of a copy's rate at which our kernel moves its bytes."""
        return self.copied / self.ours if self.ours and self.copied else None

    @property
    def differs(self) -> bool:
        """Whether a kernel of the platform computes something else than ours, or NaN."""
        return any(not value <= TOLERANCE for value in self.differences.values())

    def plain(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        derived = ("ours", "taken", "ratio", "ratio_of_best", "share", "differs")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True)
class Bench:
    """What all lines share.

    Attributes:
        rows: rows of a tree.
        space: the workspace that an engine would have.
        longest: most keys of a request in a graph; 0 takes each line's own.
        copy_rate: bytes per second of a large copy; 0 if unknown.
        timer: times a call.
        device: where it runs.
    """

    rows: int
    space: AttentionWorkspace
    longest: int
    copy_rate: float
    timer: Timer
    device: torch.device | str = "cuda"

    def measure(
        self, shape: str, layer: Layer, batch: int, context: int, costs: Costs | None = None
    ) -> Row:
        """Make a line.

        Args:
            shape: name of the model.
            layer: one of its layers.
            batch: requests.
            context: keys of each.
            costs: what an engine has measured of both of our kernels. Without it there is one.
        """
        row = Row(shape, layer.name, batch, context)
        row.bytes = moved_bytes(layer, batch, self.rows, context)
        row.copied = row.bytes / self.copy_rate * 1e6 if self.copy_rate else 0.0
        point = Point(batch, self.rows, context)
        batches = problems(layer, point, CALLS, self.device)
        longest = self.longest or context
        own = own_kernels(layer, both=costs is not None)
        for name, make in own.items():
            calls = self._time(
                row, row.own, name, functools.partial(make, batches, self.space, longest)
            )
            del calls
        row.chosen = next(iter(own))
        if costs:
            chosen = choose(costs, point.size)
            row.chosen = "two passes" if chosen == "flash" else "triton"
        self._compare(row, layer, batches, own[row.chosen], longest)
        return row

    def _compare(
        self,
        row: Row,
        layer: Layer,
        batches: Sequence[Any],
        ours: Callable[..., Calls],
        longest: int,
    ) -> None:
        """Time the platform's kernels, and compare what they compute."""
        expected = None
        if row.ours is not None:
            expected = ours([chain_of(batches[0])], self.space, longest)[0]().float()
        for name, make in yardsticks(layer):
            calls = self._time(
                row, row.platform, name, functools.partial(make, batches, self.rows, longest)
            )
            if calls and expected is not None:
                most = (calls[0]().float() - expected).abs().max()
                row.differences[name] = float(most / expected.std())
            one = functools.partial(make, batches, 1, longest)
            if calls:
                self._time(row, row.one_row, name, one, "one row")

    def _time(
        self,
        row: Row,
        times: dict[str, float],
        name: str,
        make: Callable[[], Calls],
        what: str = "",
    ) -> Calls | None:
        """Time a kernel; where it does not run, keep its error and return None."""
        try:
            calls = make()
            times[name] = self.timer(in_turn(calls))
        except Exception as error:  # Any error of a kernel is a line of the report.
            label = f"{name}, {what}" if what else name
            row.failures[label] = one_line(error)
            return None
        return calls


def own_kernels(layer: Layer, *, both: bool) -> dict[str, Callable[..., Calls]]:
    """Our kernels for a layer, the one that always runs first."""
    latent = isinstance(layer, LatentLayer)
    kernels: dict[str, Callable[..., Calls]] = {
        "triton": own_calls.latents if latent else own_calls.triton
    }
    return kernels | {"two passes": own_calls.two_pass} if both else kernels


def has_two_passes(layer: Layer) -> bool:
    """Whether an engine compares the two passes with the Triton kernel for a layer."""
    return not layer.window


def device_timer(repeats: int) -> Timer:
    """Times calls in a CUDA graph of `CALLS`, by the median of so many replays."""
    # One stream for all: the allocator does not reuse on one stream what another has freed.
    stream = torch.cuda.Stream()
    return functools.partial(graph_time, calls=CALLS, repeats=repeats, stream=stream)
