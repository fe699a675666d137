"""The processes of arms, an engine in each. One answers what it is sent, until it is sent None."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from vllm_graft.bench.common import report
from vllm_graft.bench.common.arm import Arm

Answering = Callable[[Any], Any]
"""Answers what an arm's process is sent."""

SHARE = 0.9
"""Share of a GPU's memory that several engines have together, where no flag says another."""


class CannotAnswer(RuntimeError):
    """An arm cannot do what it is asked for; the text says why, and the arm goes on."""


@contextmanager
def running(target: str | Path, options: dict[str, Any]) -> Iterator[Any]:
    """Run an engine on the GPU where there is one, else in this process by the interpreter."""
    import torch

    from vllm_graft import testing

    # Each request pays for its prompt, unless a flag says otherwise.
    options.setdefault("enable_prefix_caching", False)
    if torch.cuda.is_available():
        # The engine is ended in order, because a spawned process waits for its children before it
        # runs its exit handlers.
        engine = testing.running(target, disable_log_stats=False, **options)
        with as_a_server(), engine as llm:
            yield llm
    else:
        options.pop("gpu_memory_utilization", None)
        with testing.cpu_engine(target, **options) as llm:
            yield llm


def as_a_server() -> AbstractContextManager[Any]:
    """Let `vllm.LLM` take a server's size where flags leave one open, and not another one."""
    from vllm.entrypoints import llm
    from vllm.usage.usage_lib import UsageContext

    served = SimpleNamespace(LLM_CLASS=UsageContext.OPENAI_API_SERVER)
    return mock.patch.object(llm, "UsageContext", served)


def serve(
    pipe: Connection, target: str | Path, options: dict[str, Any], make: Callable[[Any], Answering]
) -> None:
    """Run an arm's process: start the engine, then answer with what `make` makes of it."""
    # Functions that a loop runs in workers are pickled for the engine's process. That process is
    # spawned: asking for a GPU, as below, starts CUDA, which does not survive a fork.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with running(target, options) as llm:
        answering = make(llm)
        pipe.send("ready")
        for wish in wishes(pipe):
            try:
                pipe.send(answering(wish))
            except CannotAnswer as error:
                pipe.send(str(error))


def wishes(pipe: Connection) -> Iterator[Any]:
    """What an arm is sent, until it is None, or the other end is gone: another arm failed."""
    with suppress(EOFError):
        while (wish := pipe.recv()) is not None:
            yield wish


def start(
    arms: Sequence[Arm], target: str | Path, make: Callable[[Any], Answering]
) -> dict[Arm, Connection]:
    """Start the engines of arms one after another, because vLLM measures how much memory is left.
    Where each is told the bytes of its K/V cache it need not, and they start together. `make` makes
    of an engine what answers; it is pickled. Raises `BenchmarkError` if an engine did not start."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[Arm, Connection] = {}
    told = all("kv_cache_memory_bytes" in arm.options for arm in arms)
    for arm in arms:
        options = dict(arm.options)
        if len(arms) > 1:
            share = options.get("gpu_memory_utilization", SHARE)
            options["gpu_memory_utilization"] = share / len(arms)
        pipes[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, target, options, make), daemon=False).start()
        theirs.close()
        if not told:
            wait(arm, pipes[arm])
    if told:
        for arm, pipe in pipes.items():
            wait(arm, pipe)
    return pipes


def stop(pipes: Mapping[Arm, Connection]) -> None:
    """End all engines, and wait until their memory is free."""
    for pipe in pipes.values():
        pipe.send(None)
    for process in multiprocessing.active_children():
        process.join()


def wait(arm: Arm, pipe: Connection) -> None:
    """Wait until the engine of an arm is up."""
    began = time.perf_counter()
    answer(arm, pipe, "its engine did not start")
    print(f"{arm.name}: ready after {time.perf_counter() - began:.0f} s", flush=True)


def answer(arm: Arm, pipe: Connection, otherwise: str = "its engine ended") -> Any:
    """The next answer of an arm's process, or a `BenchmarkError` that it has ended."""
    try:
        return pipe.recv()
    except EOFError:
        raise report.BenchmarkError(f"arm {arm.name}: {otherwise}; its log is above") from None
