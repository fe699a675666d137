"""What an arm's process answers, and what is said when it ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import pytest

from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.report import BenchmarkError


def test_a_process_answers_until_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def engine(target: str, options: dict[str, Any]) -> Iterator[str]:
        yield f"{target} {options['seed']}"

    def make(llm: str) -> arm_processes.Answering:
        def answering(wish: str) -> str:
            if wish == "too much":
                raise arm_processes.CannotAnswer("it holds 3")
            return f"{llm}: {wish}"

        return answering

    monkeypatch.setattr(arm_processes, "running", engine)
    monkeypatch.setattr(arm_processes.os, "environ", {})
    here, there = Pipe()
    for wish in ("hello", "too much", "again", None):
        here.send(wish)
    arm_processes.serve(there, "model", {"seed": 7}, make)
    answers = [here.recv() for _ in range(4)]
    assert answers == ["ready", "model 7: hello", "it holds 3", "model 7: again"]


def test_a_process_ends_quietly_when_nobody_asks_any_more() -> None:
    here, there = Pipe()
    here.send("hello")
    here.close()
    assert [*arm_processes.wishes(there)] == ["hello"]


def test_an_engine_that_ends_is_named() -> None:
    here, there = Pipe()
    there.close()
    with pytest.raises(BenchmarkError, match="arm ours: its engine did not start; its log"):
        arm_processes.wait(Arm("ours"), here)
    with pytest.raises(BenchmarkError, match="arm ours: its engine ended"):
        arm_processes.answer(Arm("ours"), here)


def test_arms_share_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []

    class Context:
        Pipe = staticmethod(Pipe)

        @staticmethod
        def Process(*, target: Any, args: tuple[Any, ...], daemon: bool) -> Any:
            started.append(args[2])
            args[0].send("ready")
            return type("Process", (), {"start": lambda self: None})()

    monkeypatch.setattr(arm_processes.multiprocessing, "get_context", lambda kind: Context)

    def shares(*given: dict[str, Any]) -> list[float | None]:
        started.clear()
        arms = [Arm(str(number), options) for number, options in enumerate(given)]
        assert [*arm_processes.start(arms, "model", str)] == arms
        return [options.get("gpu_memory_utilization") for options in started]

    assert shares({"seed": 1}, {"kv_cache_memory_bytes": 1 << 30}) == [0.45, 0.45]
    assert started[0]["seed"] == 1
    assert shares({"gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}) == [0.25] * 2
    # Alone, it has what vLLM gives it.
    assert shares({}) == [None]
    assert shares({"kv_cache_memory_bytes": 1}, {"kv_cache_memory_bytes": 1}) == [0.45, 0.45]
