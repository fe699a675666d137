"""The engines of arms of trees and chains, which answer cases, asks and calls."""

from __future__ import annotations

import argparse
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.bench.common import arm_processes
from vllm_graft.bench.common.arm import Arm
from vllm_graft.bench.common.closed_loop import ClosedLoop


def engine_options(arm: Arm, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``vllm.LLM`` for an arm."""
    options = arm_processes.with_options(arm.options, arguments.options)
    options["max_model_len"] = arguments.max_model_len
    options["max_num_seqs"] = max(arguments.batch)
    if arguments.fp8_target:
        options |= {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    if arguments.sizes:
        compilation = options.get("compilation_config", {})
        options["compilation_config"] = compilation | {"cudagraph_capture_sizes": arguments.sizes}
    return options


def start(
    arms: list[Arm], arguments: argparse.Namespace, prompts: list[str]
) -> dict[Arm, Connection]:
    """Start the engines of arms; each answers a `Case`, an `Ask` or a `Call`.

    Raises:
        BenchmarkError: an engine did not start.
    """
    options = {arm: engine_options(arm, arguments) for arm in arms}
    loop = partial(ClosedLoop, prompts=prompts)
    return arm_processes.start(options, arguments.pair / "target", loop, arguments.kv_cache_bytes)
