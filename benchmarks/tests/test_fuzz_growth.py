"""The fuzz judges more than answers: time on the threads of steps, memory, logs, threads."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fuzz import watch
from benchmarks.fuzz.growth import LIMITS, MIB, STEP_MS, Sizes, Watched, figures, judged
from benchmarks.fuzz.watch import Call


def burn(ms: float) -> None:
    end = time.thread_time() + ms / 1e3
    while time.thread_time() < end:
        pass


class Part:
    """A part of an engine that works as long as a request says."""

    def add_request(self, index: int, request: Any) -> int:
        burn(request.ms)
        time.sleep(request.waits)
        if request.collects:
            gc.collect()
        return index


def request(ms: float, waits: float = 0.0, *, collects: bool = False) -> Any:
    return SimpleNamespace(req_id="cmpl-fuzz-17-0-ab", ms=ms, waits=waits, collects=collects)


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(watch.FILE, str(tmp_path / "steps"))
    return tmp_path / "steps"


def test_calls_that_take_cpu_time_are_written_down(steps: Path) -> None:
    part = Part()
    watch.measure(part, ("add_request",))
    assert watch.watched(steps) == {"Part.add_request"}
    mark = steps.stat().st_size
    assert part.add_request(3, request(0)) == 3
    assert watch.calls(steps, mark) == [], "it took no time"
    part.add_request(4, request(0, waits=0.05))
    assert watch.calls(steps, mark) == [], "waiting is no work"
    part.add_request(5, request(STEP_MS + 1))
    (call,) = watch.calls(steps, mark)
    assert (call.name, call.number) == ("Part.add_request", 17)
    assert call.ms > STEP_MS
    assert gc.isenabled()


def test_no_part_is_measured_where_there_is_none(steps: Path) -> None:
    watch.measure(None, ("add_request",))
    assert watch.watched(steps) == set()


def test_a_process_writes_no_more_than_so_many_calls(
    steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MOST", 2)
    part = Part()
    watch.measure(part, ("add_request",))
    for _ in range(4):
        part.add_request(0, request(1.5))
    assert len(watch.calls(steps)) == 2


def test_vllm_finds_the_plugin_and_it_measures_what_is_imported_later(
    steps: Path, tmp_path: Path
) -> None:
    # Stands in for vLLM's modules, below other names.
    (tmp_path / "engine.py").write_text(
        "class Runner:\n    sampler = None\n"
        "    def add_requests(self, out): return out\n"
        "class Scheduler:\n    connector = None\n"
        "    def add_request(self, out): return sum(range(10**6)) and out\n"
    )
    script = """
from importlib.metadata import entry_points
(found,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "fuzz"]
register = found.load()
import fuzz_watch
fuzz_watch.WATCHED = {
    ("engine", "Runner", "add_requests"): {"sampler": ("add_request",)},
    ("engine", "Scheduler", "add_request"): {"": ("add_request",), "connector": ("x",)},
}
register()
import engine
runner, scheduler = engine.Runner(), engine.Scheduler()
class Sampler:
    def add_request(self): pass
runner.sampler = Sampler()
assert runner.add_requests(3) == 3
assert scheduler.add_request(4) == 4 == scheduler.add_request(4)
"""
    paths = [watch.plugin_path(tmp_path / "plugin"), tmp_path, *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert watch.watched(steps) == {"Sampler.add_request", "Scheduler.add_request"}
    assert len(watch.calls(steps)) == 2


def test_sizes_are_those_of_a_process_group(tmp_path: Path) -> None:
    script = (
        "import threading, time; kept = bytearray(50 << 20); "
        "[threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(4)]; "
        "print(1, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (tmp_path / "log").write_text("abc")
        found = Sizes.of(child.pid, tmp_path / "log", tmp_path / "none")
        child.kill()
    assert 50 * MIB < found.memory < 100 * MIB
    assert (found.threads, found.log, found.steps) == (5, 3, 0)
    assert Sizes.of(child.pid, tmp_path, tmp_path).threads == 0


def seen(**grown: int) -> Watched:
    """Return a server of which nothing grew but what is given, in the flood."""
    first = Sizes(100 * MIB, 40, 1000, 0)
    last = replace(first, **{name: getattr(first, name) + by for name, by in grown.items()})
    functions = {"TreeModelState.add_request"}
    return Watched(10, 10, [first, first, last], functions=functions)


def test_what_the_reference_grows_by_is_allowed() -> None:
    assert judged(seen(memory=90 * MIB), seen(memory=80 * MIB), lambda number: ()) == []


@pytest.mark.parametrize(
    ("arm", "name"),
    [
        (seen(memory=30 * MIB), "flood_mib is 30"),
        (seen(log=20_000), "flood_log_bytes is 2000"),
        (seen(threads=9), "threads is 9"),
    ],
)
def test_growth_beyond_a_limit_is_told(arm: Watched, name: str) -> None:
    (line,) = judged(arm, seen(), lambda number: ())
    assert line.startswith(name)


def test_growth_while_requests_are_answered_is_told_too() -> None:
    arm = seen()
    arm.sizes[1:] = [replace(arm.sizes[0], memory=200 * MIB, log=50_000)] * 2
    told = judged(arm, seen(), lambda number: ())
    assert [line.split()[0] for line in told] == ["memory_mib", "log_bytes"]


def test_each_kind_of_request_that_holds_a_step_is_told_once() -> None:
    arm = seen()
    arm.slow = [Call("a", 4.9, 1), Call("a", 5.5, 2), Call("a", 7.5, 3), Call("b", 6.0, None)]
    told = judged(arm, seen(), lambda number: ("flood",))
    assert told == ["a for ['flood'] took 7.5 ms of CPU", "b for no request took 6 ms of CPU"]
    assert figures(arm, seen())["step_ms"] == 7.5
    assert figures(arm, seen()).keys() == LIMITS.keys()


def test_calls_before_the_warm_up_s_end_do_not_count(steps: Path) -> None:
    steps.write_text(json.dumps({"call": "a", "ms": 9.0, "request": None}) + "\n")
    arm = seen()
    arm.sizes[0] = Sizes.of(0, steps, steps)
    arm.read(steps)
    assert arm.slow == []
