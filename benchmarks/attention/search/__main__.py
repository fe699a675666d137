"""Search for the plans by which tree attention is fastest, in CUDA graphs, on this GPU.

    python -m benchmarks.attention.search --seconds 200 --json search.json
    python -m benchmarks.attention.search --shard 1/4 --json search1.json   # of four GPUs

For each problem (a layer, requests, rows, keys; the most important first) it times vLLM's kernel
for a chain of as many rows, our two passes, today's plan (`plan_rule`), and all plans that may be
fast: tiles, warps, stages, splits. Then the best plans are varied: how page numbers are loaded,
what splits keep, how they are combined. Each result is checked against a float32 reference; a plan
that computes wrongly or does not run is listed as such. Calls of a graph read other blocks than the
calls before them, as in `benchmarks.attention`.

Plans of problems with the same layer and bound are the same at all lengths, so that a rule that
knows the bound alone can be chosen from the results. Kernels are compiled by other processes, ahead
of what is timed. The file is written after each problem. The exit status is 2 where nothing was
measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.attention.rows import CALLS, Timer, device_timer
from benchmarks.attention.search import report
from benchmarks.attention.search.candidates import distinct, first_plans, later_plans
from benchmarks.attention.search.compiling import Built, Compilers, Target
from benchmarks.attention.search.measuring import (
    Bench,
    Found,
    copied_us,
    launches_of,
    sizes_of,
    time_others,
)
from benchmarks.attention.search.points import Batch, Problem, batches_of, shard
from benchmarks.step_bytes import copy_bandwidth
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan
from vllm_graft.spec_decode.kernels.attention.tree_attention import plan_of
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace

MAX_REQS, MAX_SPLITS = 256, 64
VARIED = 3
"""Plans of a problem that are varied."""

COMING, LAG = 8, 3
"""Problems whose kernels are being compiled, and problems after which the best plans of one are
varied: meanwhile these are compiled."""

TINY_CACHE = {"cold_bytes": 1, "cache_bytes": 1}


class Stage(NamedTuple):
    """Plans of a problem that are to be timed, and what will have come of their compilation."""

    found: Found
    plans: dict[Plan, list[Future[Built]]]


class Search:
    """A search over problems.

    Args:
        problems: what to search for, the most important first.
        options: the command's options.
        compilers: compile kernels; None where there is nothing to compile.
        device: where it runs.
        timer: times a call.
        careful: times a call with more repeats.
        copy_rate: bytes per second of a large copy; 0 if unknown.
    """

    def __init__(
        self,
        problems: list[Problem],
        options: argparse.Namespace,
        compilers: Compilers | None,
        device: str,
        timer: Timer,
        careful: Timer,
        copy_rate: float = 0.0,
    ) -> None:
        self._options, self._compilers, self._device = options, compilers, device
        self._timer, self._careful = timer, careful
        self._copy_rate = copy_rate
        self.found = [Found(problem, copied_us(problem, copy_rate)) for problem in problems]

    def run(self, deadline: float, sizes: dict[str, int]) -> None:
        """Time all problems until the deadline, by ``time.monotonic``.

        Args:
            deadline: what would begin later is left out.
            sizes: as in `problems`.
        """
        coming: list[Stage] = []
        waiting: list[Stage] = []
        for number, found in enumerate(self.found):
            for each in self.found[number + len(coming) : number + COMING]:
                coming.append(self._started(each, self._first(each.problem)))
            stage = coming.pop(0)
            if time.monotonic() > deadline:
                print(f"not reached: {found.problem.name}", flush=True)
                continue
            self._time(stage, sizes)
            if found.ranked():
                waiting.append(self._started(found, self._varied(found)))
            if len(waiting) > LAG:
                self._time(waiting.pop(0), sizes)
        for stage in waiting:
            if time.monotonic() > deadline:
                print(f"not varied: {stage.found.problem.name}", flush=True)
            else:
                self._time(stage, sizes)

    def about(self) -> dict[str, Any]:
        """What the results are results of."""
        cuda = self._device == "cuda"
        properties = torch.cuda.get_device_properties(0) if cuda else None
        return {
            "device": properties.name if properties else "interpreter",
            "torch": torch.__version__,
            "copy rate": self._copy_rate,
            "longest": self._options.longest,
            "multiprocessors": properties.multi_processor_count if properties else 0,
            "compiled": self._compilers.count if self._compilers else 0,
        }

    def _space(self, problem: Problem, device: str) -> AttentionWorkspace:
        """The workspace of an engine; on ``meta`` it is as large, and takes no memory."""
        layer = problem.layer
        sizes = (MAX_REQS, problem.rows, layer.heads, layer.head_size, MAX_SPLITS, device)
        return AttentionWorkspace.allocate(*sizes)

    def _first(self, problem: Problem) -> list[Plan]:
        """Today's plan, and all that may be fast."""
        space = self._space(problem, "meta")
        [batch] = self._small(problem)
        today = plan_of(batch, space)
        sizes = sizes_of(problem, space, self._options.longest)
        plans = first_plans(sizes, overlapped=self._compilers is not None)
        if self._options.few:
            plans = plans[:: max(1, len(plans) // self._options.few)]
        return distinct([today, *plans])

    def _small(self, problem: Problem) -> list[Batch]:
        """A batch with the problem's strides and hardly any keys, on the CPU."""
        return batches_of(problem, 1, "cpu", self._options.longest, **TINY_CACHE)

    def _varied(self, found: Found) -> list[Plan]:
        """The best plans, changed."""
        known = {each.plan for each in found.timings}
        best = [each.plan for each in found.ranked()[:VARIED]]
        return [
            plan
            for plan in distinct(change for each in best for change in later_plans(each))
            if plan not in known
        ]

    def _started(self, found: Found, plans: list[Plan]) -> Stage:
        """Let the kernels of plans be compiled."""
        problem = found.problem
        if self._compilers is None:
            return Stage(found, {plan: [] for plan in plans})
        [batch], space = self._small(problem), self._space(problem, "meta")
        start = self._compilers.start
        return Stage(found, {plan: start(launches_of(batch, space, plan)) for plan in plans})

    def _time(self, stage: Stage, sizes: dict[str, int]) -> None:
        found, problem = stage.found, stage.found.problem
        space = self._space(problem, self._device)
        batches = batches_of(problem, CALLS, self._device, self._options.longest, **sizes)
        bench = Bench(batches, space, self._timer)
        first = not found.timings
        if first:
            longest = max(self._options.longest, problem.context)
            time_others(found, batches, space, longest, self._careful)
        found.timings += [bench.measure(plan, built) for plan, built in stage.plans.items()]
        if first:
            found.today = found.timings[0]
        self._again(found, bench)
        self._show(found)

    def _again(self, found: Found, bench: Bench) -> None:
        """Time today's plan and the best few with more repeats: the least of many is by luck."""
        today = [found.today] if found.today and not found.today.failure else []
        for each in [*today, *found.ranked()[: self._options.best]]:
            each.again = bench.time(each.plan, self._careful)

    def _show(self, found: Found) -> None:
        print("\n".join(report.lines(found, self._options.best)), flush=True)
        report.write(self._options.json, self.about(), self.found)
        if self._device == "cuda":
            torch.cuda.empty_cache()


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.attention.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--shard", default="1/1", help="part I/N of the problems, for N GPUs")
    made.add_argument("--only", default="", help="problems whose names contain this")
    made.add_argument("--seconds", type=float, default=200, help="no problem begins later")
    made.add_argument("--longest", type=int, default=4096, help="most keys of a request in a graph")
    made.add_argument("--best", type=int, default=6, help="plans that are printed of a problem")
    made.add_argument("--few", type=int, default=0, help="about so many plans of a problem, 0: all")
    made.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    made.add_argument("--json", type=Path, help="file that takes the results, after each problem")
    return made


def main(arguments: list[str]) -> int:
    begin = time.monotonic()
    options = parser().parse_args(arguments)
    problems = [each for each in shard(options.shard) if options.only in each.name]
    if not torch.cuda.is_available():
        print("benchmarks.attention.search needs a GPU: nothing was measured", file=sys.stderr)
        return 2
    properties = torch.cuda.get_device_properties(0)
    target: Target = ("cuda", properties.major * 10 + properties.minor, 32)
    compilers = Compilers(target, options.processes)
    try:
        search = Search(
            problems,
            options,
            compilers,
            "cuda",
            device_timer(5),
            device_timer(21),
            copy_bandwidth(torch.device("cuda")),
        )
        print(f"{search.about()}, {len(problems)} problems", flush=True)
        search.run(begin + options.seconds, {})
    finally:
        compilers.close()
    known = [each for each in search.found if each.timings]
    print(f"{len(known)} of {len(problems)} problems, {time.monotonic() - begin:.0f} s")
    return 0 if known else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
