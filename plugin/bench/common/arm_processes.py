"""The processes of arms, an engine in each. One answers what it is sent, until it is sent None."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.bench.common import report
from vllm_graft.bench.common.arm import Arm

Answering = Callable[[Any], Any]
"""Answers what an arm's process is sent."""


class CannotAnswer(RuntimeError):
    """An arm cannot do what it is asked for; the text says why, and the arm goes on."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all benchmarks of engines are told."""
    parser.add_argument("--rounds", type=int, default=3, help="turns of each arm")
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="more options of vllm.LLM for all arms, "
        """'{"load_format": "dummy"}' for example""",
    )
    parser.add_argument(
        "--kv-cache-bytes", type=int, help="of each engine; they start together then"
    )


@contextmanager
def running(target: str | Path, options: dict[str, Any]) -> Iterator[Any]:
    """Run an engine on the GPU where there is one, else in this process by the interpreter."""
    import torch

    from vllm_graft import testing

    # Each request pays for its prompt, unless `--options` say otherwise.
    options.setdefault("enable_prefix_caching", False)
    if torch.cuda.is_available():
        # The engine is ended in order, because a spawned process waits for its children before it
        # runs its exit handlers.
        engine = testing.running(target, disable_log_stats=False, **options)
    else:
        options.pop("gpu_memory_utilization")
        engine = testing.cpu_engine(target, **options)
    with engine as llm:
        yield llm


def serve(
    pipe: Connection, target: str | Path, options: dict[str, Any], make: Callable[[Any], Answering]
) -> None:
    """Run an arm's process: start the engine, then answer with what `make` makes of it."""
    # Functions such as `fix_drafts` are pickled for the engine's process. That process is spawned:
    # asking whether there is a GPU, as below, already starts CUDA, which does not survive a fork.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with running(target, options) as llm:
        answering = make(llm)
        pipe.send("ready")
        while (wish := pipe.recv()) is not None:
            try:
                pipe.send(answering(wish))
            except CannotAnswer as error:
                pipe.send(str(error))


def with_options(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """An arm's own options of ``vllm.LLM``, and those that all arms are given."""
    found = {**more, **own}
    for key in ("additional_config", "compilation_config"):
        if key in more:
            found[key] = more[key] | own.get(key, {})
    return found


def start(
    arms: Mapping[Arm, dict[str, Any]],
    target: str | Path,
    make: Callable[[Any], Answering],
    kv_cache_bytes: int | None = None,
) -> dict[Arm, Connection]:
    """Start the engines of arms one after another, because vLLM measures how much memory is left.

    With `kv_cache_bytes` of each engine it need not, and they start together. `make` makes of an
    engine what answers; it is pickled.

    Raises:
        BenchmarkError: an engine did not start.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[Arm, Connection] = {}
    for arm, given in arms.items():
        options = {"gpu_memory_utilization": 0.9 / len(arms), **given}
        if kv_cache_bytes:
            options["kv_cache_memory_bytes"] = kv_cache_bytes
        pipes[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, target, options, make), daemon=False).start()
        theirs.close()
        if not kv_cache_bytes:
            wait(arm, pipes[arm])
    if kv_cache_bytes:
        for arm, pipe in pipes.items():
            wait(arm, pipe)
    return pipes


def stop(pipes: Mapping[Arm, Connection]) -> None:
    """End all engines."""
    for pipe in pipes.values():
        pipe.send(None)


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
