"""Profiled launches become sections of steps; the profiler itself needs a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from benchmarks.bars import step_timeline
from benchmarks.bars.step_timeline import Launch, Section


def step(at: float, number: int) -> list[Launch]:
    """Make a step: a target of 100 us in two overlapping kernels, two others, a draft, another."""
    target, draft = 2 * number, 2 * number + 1
    return [
        Launch("gemm", at, at + 60, target),
        Launch("attention", at + 50, at + 100, target),
        Launch("head", at + 110, at + 120, None),
        Launch("walk", at + 125, at + 130, None),
        Launch("level", at + 131, at + 161, draft),
        Launch("inputs", at + 170, at + 172, None),
    ]


def test_a_step_is_replays_and_what_lies_between() -> None:
    found = [launch for number in range(4) for launch in step(200.0 * number, number)]
    # A step that began before the profiler is not whole, nor is a step that it cut off.
    found = [Launch("level", -40.0, -10.0, 99), *found]
    steps = step_timeline.split(found)
    assert [len(each) for each in steps] == [4, 4, 4]
    assert step_timeline.sections(steps) == [
        Section("graph 0", 110, 100, 2),
        Section("between", 21, 15, 2),
        Section("graph 1", 39, 30, 1),
        Section("between", 30, 2, 1),
    ]


def test_lines_sum_up_a_step() -> None:
    found = [launch for number in range(4) for launch in step(200.0 * number, number)]
    asked = [("cudaGraphLaunch", 90.0), ("cudaEventSynchronize", 180.0), ("cudaGraphLaunch", 45.0)]
    *parts, total, alone, head, walk, inputs, calls, wait, launch = step_timeline.lines(
        found, asked
    )
    assert [line.split()[-1] for line in parts] == ["0", "between", "1", "between"]
    assert total.split()[0] == "147.0"
    assert "of     200.0" in total
    # Figures are per step, and kernels of graphs are not among them.
    assert alone.split()[0] == "17.0"
    assert [line.split()[-1] for line in (head, walk, inputs)] == ["head", "walk", "inputs"]
    # Totals over nine steps become figures per step.
    assert [float(line.split()[0]) for line in (calls, wait, launch)] == [35.0, 20.0, 15.0]
    assert step_timeline.lines(step(0.0, 0)) == ["no two steps among 6 launches"]


def test_a_graphs_kernels_are_known_by_its_launch() -> None:
    def event(name: str, number: int, start: float, device: DeviceType) -> SimpleNamespace:
        times = SimpleNamespace(start=start, end=start + 1, elapsed_us=lambda: 1.0)
        return SimpleNamespace(name=name, id=number, time_range=times, device_type=device)

    events = [
        event("cudaGraphLaunch", 7, 0.0, DeviceType.CPU),
        event("cudaLaunchKernel", 8, 1.0, DeviceType.CPU),
        event("walk", 8, 9.0, DeviceType.CUDA),
        event("gemm", 7, 5.0, DeviceType.CUDA),
    ]
    assert step_timeline.launches(events) == [
        Launch("gemm", 5.0, 6.0, 7), Launch("walk", 9.0, 10.0, None),
    ]  # fmt: skip
    assert step_timeline.calls(events) == [("cudaGraphLaunch", 1.0), ("cudaLaunchKernel", 1.0)]


def test_some_steps_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Profile:
        def __init__(self, activities: object) -> None:
            pass

        def start(self) -> None:
            calls.append("start")

        def stop(self) -> None:
            calls.append("stop")

        def events(self) -> list[object]:
            return []

    class Runner:
        def execute_model(self, number: int) -> int:
            calls.append(str(number))
            return -number

    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(step_timeline, "SKIPPED", 2)
    monkeypatch.setattr(step_timeline, "PROFILED", 2)
    runner = Runner()
    watch = step_timeline.Watch(runner)
    assert [runner.execute_model(number) for number in range(1, 6)] == [-1, -2, -3, -4, -5]
    watch.end()
    assert runner.execute_model(6) == -6
    assert calls == ["1", "start", "2", "3", "stop", "4", "5", "6"]
