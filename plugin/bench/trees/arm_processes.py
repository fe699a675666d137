"""The processes of arms, an engine in each.

A process answers what it is sent through a pipe, until it is sent None.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.bench.common import report
from vllm_graft.bench.common.closed_loop import (
    Ask,
    Call,
    Case,
    ClosedLoop,
    Measured,
    TooFewRequests,
)
from vllm_graft.bench.common.engine_arms import Arm


@contextmanager
def running(target: Path, options: dict[str, Any]) -> Iterator[Any]:
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


def serve(pipe: Connection, target: Path, options: dict[str, Any], prompts: list[str]) -> None:
    """Run an arm's process: start the engine, then answer every `Case` with a `Measured`.

    An `Ask` is answered with answers, a `Call` with the result of the worker's function. A case
    that the engine can't hold is answered with why, a text.
    """
    # Functions such as `fix_drafts` are pickled for the engine's process. That process is spawned:
    # asking whether there is a GPU, as below, already starts CUDA, which does not survive a fork.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with running(target, options) as llm:
        loop = ClosedLoop(llm, prompts)
        pipe.send("ready")
        while (wish := pipe.recv()) is not None:
            if isinstance(wish, Call):
                pipe.send(llm.collective_rpc(wish.function, args=wish.arguments)[0])
            else:
                pipe.send(loop.answers(wish) if isinstance(wish, Ask) else _measured(loop, wish))


def _measured(loop: ClosedLoop, case: Case) -> Measured | str:
    try:
        return loop.measure(case)
    except TooFewRequests as error:
        return str(error)


def with_options(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """An arm's own options of ``vllm.LLM``, and those that all arms are given."""
    found = {**more, **own}
    for key in ("additional_config", "compilation_config"):
        if key in more:
            found[key] = more[key] | own.get(key, {})
    return found


def engine_options(arm: Arm, arguments: argparse.Namespace, engines: int) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm that shares the GPU with other engines."""
    options = with_options(arm.options, arguments.options)
    options["max_model_len"] = arguments.max_model_len
    options["max_num_seqs"] = max(arguments.batch)
    options["gpu_memory_utilization"] = 0.9 / engines
    if arguments.kv_cache_bytes:
        options["kv_cache_memory_bytes"] = arguments.kv_cache_bytes
    if arguments.fp8_target:
        options |= {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    if arguments.sizes:
        compilation = options.get("compilation_config", {})
        options["compilation_config"] = compilation | {"cudagraph_capture_sizes": arguments.sizes}
    return options


def start(
    arms: list[Arm], arguments: argparse.Namespace, prompts: list[str]
) -> dict[Arm, Connection]:
    """Start the engines one after another, because vLLM measures how much memory is left.

    With `--kv-cache-bytes` it need not, and they start together.

    Raises:
        BenchmarkError: an engine did not start.
    """
    context = multiprocessing.get_context("spawn")
    target, pipes = arguments.pair / "target", {}
    for arm in arms:
        options = engine_options(arm, arguments, len(arms))
        pipes[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, target, options, prompts), daemon=False).start()
        theirs.close()
        if not arguments.kv_cache_bytes:
            wait(arm, pipes[arm])
    if arguments.kv_cache_bytes:
        for arm, pipe in pipes.items():
            wait(arm, pipe)
    return pipes


def wait(arm: Arm, pipe: Connection) -> None:
    """Wait until the engine of an arm is up."""
    began = time.perf_counter()
    try:
        pipe.recv()
    except EOFError:
        raise report.BenchmarkError(
            f"arm {arm.name}: its engine did not start; its log is above"
        ) from None
    print(f"{arm.name}: ready after {time.perf_counter() - began:.0f} s", flush=True)
