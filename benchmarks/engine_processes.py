"""Engines of several arms, each in a process of its own, with the engine core in it.

All start together. What a process answers, and in whose turn, is the benchmark's own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.pair_arms import read_arm
from vllm_graft.bench.common import report

CPU_OPTIONS = ("speculative_config", "additional_config", "max_num_seqs")


@dataclass(frozen=True)
class Plan:
    """The work of each arm's process."""

    target: Path
    draft: Path
    prompts: list[str]
    batches: list[int]
    temperature: float
    tokens: int
    options: dict[str, Any]


def parser_of(
    description: str,
    *,
    arms: Sequence[str],
    batches: Sequence[int],
    tokens: int,
    sizes: Sequence[int],
) -> argparse.ArgumentParser:
    """Make a parser of what all such benchmarks are told, with a benchmark's own defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--target", type=Path, help="instead of PAIR/target")
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 head, instead of PAIR/eagle3")
    parser.add_argument("--prompts", type=Path, help="JSON list, instead of PAIR/prompts.json")
    parser.add_argument("--arms", nargs="+", default=arms)
    parser.add_argument("--batch", nargs="+", type=int, default=batches, help="requests at a time")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens per request")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--sizes", nargs="+", type=int, default=sizes, help="of graphs, in rows")
    parser.add_argument("--kv-cache-bytes", type=int, default=2**32, help="of each engine")
    parser.add_argument("--json", type=Path)
    return parser


def plan_of(given: argparse.Namespace, **options: Any) -> Plan:
    """The plan of what `parser_of` has read, with more options of `vllm.LLM` for all arms."""
    return Plan(
        given.target or given.pair / "target",
        given.draft or given.pair / "eagle3",
        json.loads((given.prompts or given.pair / "prompts.json").read_text()),
        given.batch,
        given.temperature,
        given.tokens,
        {
            "tree": {"topk": given.topk, "steps": given.steps},
            "max_num_seqs": max(given.batch),
            # It is given because engines that start together can't measure how much memory is left.
            "kv_cache_memory_bytes": given.kv_cache_bytes,
            "compilation_config": {"cudagraph_capture_sizes": given.sizes},
            **options,
        },
    )


def engine_options(arm: str, plan: Plan) -> dict[str, Any]:
    """Return the options of `vllm.LLM` that make an arm.

    Raises:
        SystemExit: the arm's name can't be read, or names no single chain or tree.
    """
    options = dict(plan.options)
    tree = options.pop("tree")
    try:
        found = read_arm(arm, plan.draft, tree["topk"], tree["steps"], options["max_num_seqs"])
    except report.BenchmarkError as error:
        sys.exit(str(error))
    if found.drafts or not found.options:
        sys.exit(f"--arms {arm!r}: one chain or tree an arm")
    return {**options, **found.options}


@contextmanager
def running(plan: Plan, options: dict[str, Any]) -> Iterator[Any]:
    """Run an engine in this process, on the GPU where there is one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if torch.cuda.is_available():
        from vllm import LLM

        yield LLM(str(plan.target), enable_prefix_caching=False, **options)
        return
    from vllm_graft.testing import cpu_engine

    options = {key: value for key, value in options.items() if key in CPU_OPTIONS}
    with cpu_engine(plan.target, enable_prefix_caching=False, **options) as llm:
        yield llm


def start(
    arms: list[str], serve: Callable[..., None], plan: Plan, *more: Any
) -> dict[str, Connection]:
    """Start all arms at once, and wait until each has said that its engine is up.

    Args:
        arms: names of arms.
        serve: run in each arm's process with a pipe, the arm, `plan` and `more`; it sends one
            message once the engine is up.
        plan: as told to `serve`.
        *more: likewise.

    Raises:
        SystemExit: a process died.
    """
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for arm in arms:
        pipes[arm], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, arm, plan, *more)).start()
        theirs.close()
    for arm, pipe in pipes.items():
        answer(arm, pipe)
    return pipes


def answer(arm: str, pipe: Connection) -> Any:
    """The next message of an arm's process.

    Raises:
        SystemExit: the process died.
    """
    try:
        return pipe.recv()
    except EOFError:
        sys.exit(f"arm {arm}: its process died; its log is above")
