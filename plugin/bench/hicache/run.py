"""One run of the benchmark: which engine runs which part, and until when."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_graft.bench.hicache import cache_report as reports
from vllm_graft.bench.hicache.cache_arms import Arm, Plan
from vllm_graft.bench.hicache.model_sizes import Sizes

SHARES = {"ttft": 1.0, "decode": 1.0, "load": 3.0}
"""Shares of the remaining time for the parts whose arms take turns."""

CLOSE_SECONDS = 12.0
"""Seconds that are kept for the tables and the engines' end."""


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


class Run:
    """One run of the command.

    Args:
        arguments: arguments of the command line; both models exist.
        sizes: how much each part does.
    """

    def __init__(self, arguments: argparse.Namespace, sizes: Sizes) -> None:
        self._arguments, self._sizes = arguments, sizes
        self._start = time.perf_counter()
        self.report = reports.Report(Path(arguments.json) if arguments.json else None, say)
        self._arms: dict[str, Arm] = {}
        self._races: dict[str, Arm] = {}

    @property
    def left(self) -> float:
        """Seconds until the arms have to stop."""
        until = self._start + float(self._arguments.seconds) - CLOSE_SECONDS
        return max(0.0, until - time.perf_counter())

    def run(self, parts: list[str]) -> None:
        """Run all parts, in the order of the engines that they need.

        The race has small engines of its own, and is over before the others have started.
        """
        self._spawn(parts)
        if "copy" in parts:
            self._try("copy", self._copy)
        self._begin()
        if "race" in parts:
            self._try("race", self._race)
        for arm in self._arms.values():
            self._ready(arm)
        for name, arm in self._arms.items():
            self.report.add("warm", name, arm.call("warm", limit=self._limit(120)))
        timed = [part for part in SHARES if part in parts]
        for number, part in enumerate(timed):
            share = SHARES[part] / sum(SHARES[later] for later in timed[number:])
            self._try(part, getattr(self, f"_{part}"), time.perf_counter() + share * self.left)

    def finish(self) -> None:
        """Print the tables and draw the plot."""
        arms = self._arguments.arms
        say("\n" + reports.arms_table(self.report, arms))
        say("\n" + reports.bars_table(self.report, arms))
        say(f"\n{time.perf_counter() - self._start:.0f} s in all")
        if self._arguments.plot:
            say(reports.plot(self.report, arms, Path(self._arguments.plot)))

    def close(self) -> None:
        """Shut everything down."""
        arms = [*self._arms.values(), *self._races.values()]
        for arm in arms:
            arm.stop()
        end = time.perf_counter() + CLOSE_SECONDS - 2
        for arm in arms:
            arm.close(max(0.1, end - time.perf_counter()))

    def _spawn(self, parts: list[str]) -> None:
        """Spawn a process for every engine that the parts need; they import vLLM and wait."""
        arguments, sizes = self._arguments, self._sizes
        ours = {
            "connector": arguments.connector,
            "module": arguments.connector_module,
            "compiled": not arguments.no_compile,
        }
        if set(SHARES) & set(parts):
            for name in arguments.arms:
                plan = Plan(
                    name,
                    arguments.model,
                    arguments.device,
                    sizes,
                    load_format=arguments.load_format,
                    **ours,
                )
                self._arms[name] = Arm(plan)
        if "race" in parts:
            small = dataclasses.replace(
                sizes,
                gpu_tokens=sizes.race_gpu_tokens,
                host_gib=sizes.race_host_gib,
                max_model_len=min(sizes.max_model_len, sizes.race_gpu_tokens),
                max_num_seqs=sizes.race_batch,
                # There is one graph, to which every batch is padded.
                capture=(sizes.race_batch,),
            )
            for load in arguments.race_loads:
                name = "race:" + json.dumps({"load": load})
                plan = Plan(name, arguments.race_model, arguments.device, small, **ours)
                self._races[load] = Arm(plan)

    def _begin(self) -> None:
        """Let all engines start, one by one if told so."""
        for arm in [*self._races.values(), *self._arms.values()]:
            arm.begin()
            if self._arguments.one_by_one:
                self._ready(arm)
            else:
                time.sleep(0.5)

    def _ready(self, arm: Arm) -> None:
        """Wait for an engine's start, and tell how long it took."""
        if arm.started:
            return
        # An engine that hangs must not use up the others' time.
        row = arm.wait(self._limit(0.6 * self._arguments.seconds))
        arm.started = True
        arm.failed = arm.failed or row.get("error")
        since = time.perf_counter() - self._start
        self.report.add("start", arm.name, {**row, "at": since})

    def _try(self, part: str, measure: Any, *arguments: Any) -> None:
        try:
            measure(*arguments)
        except Exception as error:
            traceback.print_exc()
            self.report.add(part, "all", {"error": f"{type(error).__name__}: {error}"})

    def _limit(self, seconds: float) -> float:
        return max(0.1, min(seconds, self.left))

    def _living(self) -> dict[str, Arm]:
        return {name: arm for name, arm in self._arms.items() if arm.failed is None}

    def _turns(self, rounds: int, until: float) -> Iterator[tuple[int, str, Arm]]:
        """Yield (round, name, arm); every round has all arms, in the other order each time."""
        longest = 0.0
        for number in range(rounds):
            begun = time.perf_counter()
            # A round that is cut short would leave arms with different numbers of rounds.
            if begun + longest > until:
                say(f"(out of time after {number} of {rounds} rounds)")
                return
            arms = list(self._living().items())
            for name, arm in reversed(arms) if number % 2 else arms:
                yield number, name, arm
            longest = max(longest, time.perf_counter() - begun)

    def _copy(self) -> None:
        """Measure the bandwidth of our copies and of memcpy."""
        from vllm_graft.bench.hicache import copy_times as copies

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._arguments.device, self._arguments.tiny)
        process = context.Process(target=copies.serve, args=arguments)
        process.start()
        theirs.close()
        rows: list[dict[str, Any]] = [{"what": "engine", "error": "no answer"}]
        with contextlib.suppress(EOFError):
            if ours.poll(self._limit(self._arguments.part_seconds)):
                rows = ours.recv()
        for row in rows:
            self.report.add("copy", row.pop("what"), row)
        process.kill()
        process.join()

    def _ttft(self, until: float) -> None:
        """Time first tokens in turns; each repeat has its own prefix."""
        for repeat, name, arm in self._turns(self._sizes.ttft_repeats, until):
            self.report.add("ttft", name, arm.call("ttft", str(repeat), limit=self._limit(60)))

    def _decode(self, until: float) -> None:
        """Time decoding, arm by arm in turns."""
        for number, name, arm in self._turns(self._sizes.decode_rounds, until):
            self.report.add("decode", name, arm.call("decode", str(number), limit=self._limit(60)))

    def _load(self, until: float) -> None:
        """Run sessions in turns, each arm with empty caches; the first round may be cut short."""
        arms = max(1, len(self._living()))
        share = (until - time.perf_counter()) / arms
        for number, name, arm in self._turns(self._sizes.load_rounds, until):
            seconds = max(1.0, min(self._arguments.part_seconds, share, self.left - 2))
            row = arm.call("load", seconds, limit=self._limit(seconds + 60))
            self.report.add("load", name, {"round": number, **row})

    def _race(self) -> None:
        """Serve full hits while copies are slow, by all ways to load at once: nothing is timed."""
        for arm in self._races.values():
            self._ready(arm)
        for part in ("warm", "control"):
            self._all_races(part, f"race-{part}")
        seconds = self._limit(self._arguments.part_seconds)
        self._all_races("race", "race", self._arguments.race_count, seconds)
        for arm in self._races.values():
            arm.stop()

    def _all_races(self, part: str, title: str, *arguments: Any) -> None:
        for arm in self._races.values():
            arm.ask(part, *arguments)
        for load, arm in self._races.items():
            limit = self._limit(self._arguments.part_seconds + 60)
            self.report.add(title, load, arm.wait(limit))
