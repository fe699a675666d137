"""Compare two builds of vllm-graft on one machine, in turns: tokens per second, host time.

    python -P benchmarks/builds.py PAIR --build old=/tmp/old --build new=/tmp/new \\
        --graft 'old={"eagle": {"tree": "auto"}}' --graft 'new={"tree": {"shape": "auto"}}'

It checks a change that should cost nothing. A build is a folder that comes first on its process's
path (a wheel that was unpacked), and what stands under the key `graft` for it. All engines are up
side by side and take turns. In its turn an engine serves one window: as many requests as the cell's
batch, with the same prompts and seeds for all. The next round has other prompts and the other
order. Nothing here imports vllm_graft, because each process has its own. `host` is the wall time of
the scheduler's and the model runner's methods of a step, the median over steps that hold nothing
but decodes of the whole batch.

A ratio is the second build's over the first's, the median over rounds, with the least and the
greatest. The exit status is 1 if the median ratio of a rate is below 1 - `--within`, or that of a
host time above 1 + `--within`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

SIZES = [1, 8, 16, 32, 64, 128, 256, 512, 1024]
"""Sizes of graphs, in rows."""

READY = "@builds "
"""Prefix of a line for the parent, because engines write to standard output as well."""


@dataclass(frozen=True)
class Window:
    """One window of a build.

    Attributes:
        rate: tokens per second.
        host: microseconds of the host per step.
        steps: how many steps held decodes of the whole batch and nothing else.
    """

    build: str
    batch: int
    temperature: float
    turn: int
    rate: float
    host: float
    steps: float


class HostClock:
    """Sums up the host's time of each step of an engine in this process."""

    def __init__(self, core: Any) -> None:
        runner, scheduler = core.model_executor.driver_worker.model_runner, core.scheduler
        self._spent, self._whole, self._batch = 0.0, False, 0
        self.steps: list[float] = []
        for owner, name, after in (
            (scheduler, "schedule", self._scheduled),
            (runner, "execute_model", None),
            (runner, "sample_tokens", self._launched),
            (scheduler, "update_from_output", None),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), after))

    def begin(self, batch: int) -> None:
        """Forget all steps; from now on steps of ``batch`` decodes are counted."""
        self._batch, self.steps = batch, []

    def _timed(
        self, method: Callable[..., Any], after: Callable[[Any], None] | None
    ) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            self._spent += time.perf_counter() - began
            if after is not None:
                after(result)
            return result

        return timed

    def _scheduled(self, output: Any) -> None:
        drafts, counts = output.scheduled_spec_decode_tokens, output.num_scheduled_tokens
        decodes = all(count == 1 + len(drafts.get(name, ())) for name, count in counts.items())
        new = output.scheduled_new_reqs
        self._whole = decodes and not new and len(counts) == self._batch

    def _launched(self, output: Any) -> None:
        if self._whole:
            self.steps.append(self._spent)
        self._spent = 0.0


@contextmanager
def running(options: dict[str, Any]) -> Iterator[Any]:
    """An engine in this process, on the GPU where there is one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if torch.cuda.is_available():
        from vllm import LLM

        yield LLM(**options)
        return
    from vllm_graft.testing import cpu_engine

    known = ("speculative_config", "additional_config", "max_num_seqs", "enable_prefix_caching")
    with cpu_engine(options["model"], **{key: options[key] for key in known}) as llm:
        yield llm


def serve(options: dict[str, Any]) -> None:
    """A build's process: answers each line of standard input with a window."""
    with running(options) as llm:
        core: Any = llm.llm_engine.engine_core
        clock = HostClock(core.engine_core)
        print(READY + json.dumps({}), flush=True)
        for line in sys.stdin:
            print(READY + json.dumps(window(llm, clock, **json.loads(line))), flush=True)


def window(
    llm: Any,
    clock: HostClock,
    prompts: list[str],
    seeds: list[int],
    temperature: float,
    tokens: int,
) -> dict[str, float]:
    """Serve as many requests as there are prompts at once, ``tokens`` for each."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
        for seed in seeds
    ]
    clock.begin(len(prompts))
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    spent = time.perf_counter() - began
    # The first steps of a batch still do work that is done only once.
    steps = clock.steps[4:]
    return {
        "rate": len(prompts) * tokens / spent,
        "host": 1e6 * statistics.median(steps) if steps else float("nan"),
        "steps": len(clock.steps),
    }


class Build:
    """A process with an engine of one build."""

    def __init__(self, name: str, site: str, options: dict[str, Any], log: TextIO) -> None:
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--serve", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def answer(self) -> dict[str, float]:
        """Wait for the next answer.

        Raises:
            SystemExit: the process died.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(READY):
                found: dict[str, float] = json.loads(line.removeprefix(READY))
                return found
        sys.exit(f"build {self.name}: its process died; its log is {self.name}.log")

    def ask(self, **question: Any) -> dict[str, float]:
        """Have the build serve one window, and return it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        """Let the process end."""
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Ratio:
    """The second build over the first: a median over rounds, the least and the greatest."""

    median: float
    least: float
    greatest: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.least:.3f} to {self.greatest:.3f})"


def ratio(windows: Sequence[Window], names: Sequence[str], value: str) -> Ratio:
    """Compute the ratio of two builds in one cell, from rounds that hold a window of each."""
    by_round: dict[int, dict[str, float]] = {}
    for window in windows:
        by_round.setdefault(window.turn, {})[window.build] = getattr(window, value)
    first, second = names
    found = [sides[second] / sides[first] for sides in by_round.values() if len(sides) == 2]
    return Ratio(statistics.median(found), min(found), max(found))


def measure(builds: Sequence[Build], given: argparse.Namespace, prompts: list[str]) -> list[Window]:
    """Take turns until the rounds or the seconds are over."""
    windows: list[Window] = []
    began = time.monotonic()
    for turn in range(-1, given.rounds):
        for temperature in given.temperature:
            for batch in given.batch:
                if time.monotonic() - began > given.seconds:
                    return windows
                chosen = [prompts[(turn * 37 + i) % len(prompts)] for i in range(batch)]
                seeds = [1000 * (turn + 1) + i for i in range(batch)]
                for build in builds if turn % 2 else builds[::-1]:
                    found = build.ask(
                        prompts=chosen, seeds=seeds, temperature=temperature, tokens=given.tokens
                    )
                    # The first round compiles kernels, and `auto` learns in it; it is not counted.
                    if turn >= 0:
                        window = Window(build.name, batch, temperature, turn, **found)
                        windows.append(window)
                        print(json.dumps(asdict(window)), flush=True)
    return windows


def verdict(windows: Sequence[Window], names: Sequence[str], within: float) -> bool:
    """Print a line per cell; return whether all of them are within the bound."""
    good = bool(windows)
    for batch, temperature in sorted({(each.batch, each.temperature) for each in windows}):
        cell = [each for each in windows if (each.batch, each.temperature) == (batch, temperature)]
        rate, host = ratio(cell, names, "rate"), ratio(cell, names, "host")
        good &= rate.median >= 1 - within and host.median <= 1 + within
        rates = ", ".join(
            f"{name} {statistics.median(each.rate for each in cell if each.build == name):.0f}"
            for name in names
        )
        hosts = ", ".join(
            f"{name} {statistics.median(each.host for each in cell if each.build == name):.0f}"
            for name in names
        )
        print(
            f"batch {batch} T={temperature:g}: tokens/s {rates}, ratio {rate}; host us per step "
            f"{hosts}, ratio {host}"
        )
    return good


def named(values: Sequence[str]) -> dict[str, str]:
    """Read ``name=value`` pairs."""
    return dict(value.split("=", 1) for value in values)


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--serve"]:
        serve(json.loads(arguments[1]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pair", type=Path, help="a folder with target, eagle3 and prompts.json")
    parser.add_argument("--build", action="append", required=True, help="NAME=FOLDER, two of them")
    parser.add_argument("--graft", action="append", required=True, help="NAME=JSON, one per build")
    parser.add_argument("--nodes", type=int, default=63)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=512, help="tokens per request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=9999, help="for all windows")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=[1, 8, 16, 32, 64, 128, 256, 512, 1024]
    )
    parser.add_argument("--kv-cache-bytes", type=int, default=2**32, help="of each engine")
    parser.add_argument("--within", type=float, default=0.02)
    parser.add_argument("--logs", type=Path, default=Path())
    given = parser.parse_args(arguments)
    sites, grafts = named(given.build), named(given.graft)
    if len(sites) != 2 or set(sites) != set(grafts):
        parser.error("name two builds, and a --graft for each")
    options = {
        "model": str(given.pair / "target"),
        "speculative_config": {
            "method": "eagle3",
            "model": str(given.pair / "eagle3"),
            "num_speculative_tokens": given.nodes,
        },
        "enable_prefix_caching": False,
        "max_num_seqs": max(given.batch),
        "max_model_len": 2048,
        # It is given because engines that start together can't measure how much memory is left.
        "kv_cache_memory_bytes": given.kv_cache_bytes,
        "gpu_memory_utilization": 0.45,
        "compilation_config": {"cudagraph_capture_sizes": given.sizes},
    }
    builds = []
    for name, site in sites.items():
        with open(given.logs / f"{name}.log", "w") as log:
            own = {**options, "additional_config": {"graft": json.loads(grafts[name])}}
            builds.append(Build(name, site, own, log))
    try:
        for build in builds:
            build.answer()
        windows = measure(builds, given, json.loads((given.pair / "prompts.json").read_text()))
    finally:
        for build in builds:
            build.end()
    return 0 if verdict(windows, list(sites), given.within) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
