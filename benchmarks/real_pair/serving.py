"""Servers of several arms, side by side on one GPU, that take turns at vLLM's serving benchmark.

All servers are up before anything is measured, because a start takes longer than a measurement. A
cell is a load, one after another goes to each arm, and the order of arms turns round with each
cell. The load comes from `vllm.benchmarks.serve`, which is what `vllm bench serve` runs: the
requests of a workload, through the chat API. All arms are asked the same ones, and each round asks
others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.pair_arms import draft_folder, read_arm
from benchmarks.real_pair import workloads
from benchmarks.real_pair.cells import Cell, Measured, most_requests
from tests.support.engines.vllm_server import VLLM, ServerError, VllmServer
from vllm_graft.bench.common import report
from vllm_graft.metrics.server_info import total

MODEL = "real-pair"

GRAFT = "graft"
"""The arm that leaves all choices to `--additional-config.graft auto`, with the draft in FP8."""

CHANGED: dict[str, dict[str, Any]] = {
    "graft+uncut": {"fit_graphs": False},
    "graft+whole-prompts": {"fit_prompts": False, "ngram": True},
    "graft+ngram": {"ngram": True},
    "graft-ngram": {"ngram": False},
}
"""What stands in for that, written out, but for a key: trees beside prompts keep all nodes,
n-grams of the text join the trees or don't, prompts run in the steps that vLLM makes."""

DRAFTED = {"draft_model": 3}
"""Tokens that `GRAFT` is told of methods whose every token costs a pass of a whole model."""

ALONE = "graft-draft"
"""The arm of `--additional-config.graft auto` without a draft."""


@dataclass(frozen=True)
class Load:
    """What all cells share: the workloads, the tokenizer, the objectives of goodput.

    Attributes:
        workloads: a file for each name, as the serving benchmark reads its dataset "custom", and
            how many requests it has.
    """

    workloads: Mapping[str, tuple[Path, int]]
    tokenizer: Path
    goodput: tuple[str, ...] = ("ttft:1000", "tpot:25")


def load_of(pair: Path, names: Sequence[str], folder: Path) -> Load:
    """Write the requests of workloads into a folder; of ``NAME=FILE``, they are in the file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(pair / "target"))
    written = {}
    for given in names:
        name, _, told = given.partition("=")
        file = Path(told) if told else folder / f"{name}.jsonl"
        if not told:
            workloads.write_requests(workloads.WORKLOADS[name](pair, tokenizer), file)
        written[name] = (file, len(file.read_text().splitlines()))
    return Load(written, pair / "target")


def arm_flags(name: str, pair: Path, topk: int, steps: int, max_num_seqs: int) -> list[str]:
    """The flags of `vllm serve` for an arm.

    An arm is one of `benchmarks.pair_arms`, whose draft is an EAGLE-3 head unless a method of vLLM
    stands before it, as in ``draft_model/block:3``; `GRAFT`, one of `CHANGED`, or `ALONE`.

    Raises:
        BenchmarkError: the name can't be read, or asks for several lengths of chains.
    """
    auto = ["--additional-config.graft", "auto"]
    if name == ALONE:
        return auto
    method, _, name = name.rpartition("/")
    method = method or "eagle3"
    draft = draft_folder(pair, method)
    if name == GRAFT or name in CHANGED:
        tokens = DRAFTED.get(method, steps)
        told = {"method": method, "model": str(draft), "num_speculative_tokens": tokens}
        told["quantization"] = "fp8_per_channel"
        flags = ["--speculative-config", json.dumps(told)]
        if name == GRAFT:
            return [*flags, *auto]
        tree = {"topk": 8, "nodes": 63, "shape": "auto", "head_dtype": "fp8", **CHANGED[name]}
        return [*flags, "--additional-config", json.dumps({"graft": {"tree": tree}})]
    arm = read_arm(name, draft, topk, steps, max_num_seqs, method)
    if arm.drafts:
        raise report.BenchmarkError(
            f"--arms {name!r}: a server can't be told another length; give each an arm of its own"
        )
    flags = []
    for key in ("speculative_config", "additional_config", "compilation_config"):
        if key in arm.options:
            flags += [f"--{key.replace('_', '-')}", json.dumps(arm.options[key])]
    return flags


def server_flags(pair: Path, arguments: argparse.Namespace) -> list[str]:
    """The flags that all arms share."""
    flags = [str(pair / "target"), "--served-model-name", MODEL, "--generation-config", "vllm"]
    flags += ["--max-model-len", str(arguments.max_model_len)]
    flags += ["--max-num-seqs", str(arguments.max_num_seqs)]
    flags += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if arguments.kv_cache_bytes:
        # Servers that start together can't measure how much memory is free.
        flags += ["--kv-cache-memory-bytes", str(arguments.kv_cache_bytes)]
        flags += ["--gpu-memory-utilization", "0.1"]
    if arguments.sizes:
        compilation = {"cudagraph_capture_sizes": arguments.sizes}
        flags += ["--compilation-config", json.dumps(compilation)]
    return [*flags, *arguments.server_flags]


@contextlib.contextmanager
def servers(
    pair: Path, arguments: argparse.Namespace, logs: Path
) -> Iterator[dict[str, VllmServer]]:
    """Start a server of each arm, all at once, and wait until all are ready.

    An arm whose server does not start is left out, and why is printed: the others are up by then.

    Raises:
        ServerError: no server started.
    """
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {} if _cuda() else {"VLLM_GRAFT_INTERPRET": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    shared = server_flags(pair, arguments)
    started = {}
    for place, name in enumerate(arguments.arms):
        flags = arm_flags(name, pair, arguments.topk, arguments.steps, arguments.max_num_seqs)
        log = logs / f"{place}-{re.sub('[:+/]', '-', name)}.log"
        started[name] = VllmServer([*shared, *flags], log, environment, VLLM)
    with contextlib.ExitStack() as running:
        for server in started.values():
            running.enter_context(server)
        failed: ServerError | None = None
        for name, server in list(started.items()):
            print(f"waiting for {name}", flush=True)
            try:
                server.wait_ready(arguments.start_seconds, every=20)
            except ServerError as error:
                print(f"Error: {name} is left out: {error}", flush=True)
                server.stop()
                failed = error
                del started[name]
        if failed and not started:
            raise failed
        yield started


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def client_flags(
    server: VllmServer, load: Load, cell: Cell, requests: int, seed: int = 0
) -> list[str]:
    """The arguments of `vllm bench serve` for a cell; the seed chooses its requests."""
    flags = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    flags += ["--base-url", server.address, "--model", MODEL, "--tokenizer", str(load.tokenizer)]
    # The server applies the chat template.
    flags += ["--dataset-name", "custom", "--custom-output-len", "-1", "--skip-chat-template"]
    flags += ["--dataset-path", str(load.workloads[cell.workload][0])]
    flags += ["--num-prompts", str(requests), "--seed", str(seed)]
    flags += ["--temperature", f"{cell.temperature:g}"]
    flags += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99"]
    flags += ["--goodput", *load.goodput, "--disable-tqdm", "--save-detailed"]
    if cell.rate:
        flags += ["--request-rate", f"{cell.rate:g}"]
    else:
        flags += ["--max-concurrency", str(cell.batch)]
    return flags


def measure(server: VllmServer, load: Load, cell: Cell, requests: int, seed: int = 0) -> Measured:
    """Put a load on a server and say what came of it.

    Raises:
        BenchmarkError: requests failed.
    """
    from vllm.benchmarks import serve
    from vllm.tokenizers import cached_get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # A turn lasts seconds, of which reading a large tokenizer would take one.
    serve.get_tokenizer = cached_get_tokenizer
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    given = parser.parse_args(client_flags(server, load, cell, requests, seed))
    before = counted(server.address)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        found: dict[str, Any] = asyncio.run(serve.main_async(given))
    after = counted(server.address)
    if found["completed"] < requests:
        raise report.BenchmarkError(
            f"{server.address}: {requests - found['completed']} of {requests} requests failed; "
            f"its log is {server.log}"
        )
    engine = {name: after[name] - before[name] for name in before}
    return replace(Measured.of(found), engine=engine)


COUNTED = {
    "steps": ("vllm:iteration_tokens_total_count", {}),
    "mixed_replays": ("vllm:graft_tree_target_replays_total", {"batch": "mixed"}),
    "mixed_launches": ("vllm:graft_tree_target_launches_total", {"batch": "mixed"}),
    "cut_steps": ("vllm:graft_tree_cut_steps_total", {}),
    "chunked_steps": ("vllm:graft_tree_chunked_steps_total", {}),
}
"""What is read of a server's ``/metrics``: its steps, and those of trees beside prompts."""


def counted(address: str) -> dict[str, float]:
    """Counters of a server by the names of `COUNTED`; 0 where it has none."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as page:
        text = page.read().decode()
    return {name: total(text, series, **labels) for name, (series, labels) in COUNTED.items()}


class Race:
    """Arms that take turns at cells, and what they have shown so far."""

    def __init__(self, load: Load, json_file: str | None, settings: dict[str, str]) -> None:
        self.load, self.json, self.settings = load, json_file, settings
        self.found: dict[Cell, dict[str, list[Measured]]] = {}

    def run(
        self,
        running: dict[str, VllmServer],
        cells: Sequence[Cell],
        rounds: int,
        seconds: float,
        until: float,
    ) -> None:
        """Go round the cells until the rounds are over, or the next cell would not end in time."""
        took: dict[Cell, float] = {}
        for number in range(rounds):
            for place, cell in enumerate(cells):
                if until - time.perf_counter() < took.get(cell, seconds * len(running)):
                    print(f"no time left for {cell} in round {number}", flush=True)
                    continue
                began = time.perf_counter()
                names = list(running)[:: -1 if (number + place) % 2 else 1]
                for name in names:
                    try:
                        self._turn(name, running[name], cell, seconds, number)
                    except report.BenchmarkError as error:
                        # The others go on, and what is missing shows in the table.
                        print(f"Error: {name} is left out from here: {error}", flush=True)
                        del running[name]
                took[cell] = time.perf_counter() - began
                self.write()

    def warm_up(self, running: dict[str, VllmServer], cells: Sequence[Cell]) -> None:
        """Have all arms answer some requests of each temperature, to compile what is left."""
        batch, workload = max((cell.batch, cell.workload) for cell in cells)
        for temperature in sorted({cell.temperature for cell in cells}):
            for server in running.values():
                cell = Cell(temperature, batch, workload=workload)
                measure(server, self.load, cell, min(batch, 16))

    def _turn(self, name: str, server: VllmServer, cell: Cell, seconds: float, seed: int) -> None:
        # A request that comes twice would find its first answer in a memory of all requests.
        requests = min(most_requests(cell, seconds), self.load.workloads[cell.workload][1])
        measured = measure(server, self.load, cell, requests, seed)
        self.found.setdefault(cell, {}).setdefault(name, []).append(measured)
        print(f"{cell}: {name}: {measured}", flush=True)
        print(f"    {measured.engine}; last first tokens: {measured.slowest}", flush=True)

    def write(self) -> None:
        """Write everything so far at once."""
        if self.json is None:
            return
        cells = [
            {
                "cell": vars(cell),
                "arms": {name: [vars(m) for m in all_] for name, all_ in arms.items()},
            }
            for cell, arms in self.found.items()
        ]
        report.write_json(
            f"{self.json}.new", {"settings": self.settings, "cells": cells}, quiet=True
        )
        os.replace(f"{self.json}.new", self.json)
