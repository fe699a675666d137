"""A head that goes on learning while what is asked changes.

    python -m benchmarks.shift PAIR --minutes 10 --cards 0 1 -- --minutes-per-round 2.5

PAIR is a folder as `benchmarks.real_pair` makes one, whose head was trained on chats. A server on
the first card records and follows (`graft.learn`), and answers one load after another: chats, then
the requests of `--workload`, then these while `vllm-graft learn` trains on the second card, and
chats again with the trainer gone. Trees have no n-grams, unless `--ngram`, so that what drafts is
the head alone. Each line has tokens per second, tokens per tree, and the head that drafts. What
follows `--` are options of `learn`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.real_pair.cells import Cell
from benchmarks.real_pair.serving import MODEL, Load, load_of, measure
from benchmarks.workloads.__main__ import main as write_workload
from tests.support.engines.vllm_server import VLLM, SpecDecodeCounters, VllmServer
from vllm_graft.metrics.server_info import total

HEADS = {"head": "head", "head_swaps": "head_swaps_total", "head_rollbacks": "head_rollbacks_total"}
"""Metrics of `vllm_graft.learn` behind ``vllm:graft_learn_``."""


class Course:
    """A server, and what it did with each load so far."""

    def __init__(self, server: VllmServer, load: Load, requests: int) -> None:
        self.server, self.load, self.requests = server, load, requests
        self.began, self.rows = time.monotonic(), list[dict[str, Any]]()

    def cell(self, phase: str, cell: Cell) -> None:
        """Put a load on the server, and print its line."""
        before = self.server.counters()
        found = measure(self.server, self.load, cell, self.requests, seed=len(self.rows))
        page = self.server.metrics()
        trees = SpecDecodeCounters.parse(page) - before
        row = {
            "phase": phase,
            "seconds": round(time.monotonic() - self.began, 1),
            **asdict(cell),
            "tokens_per_second": found.tokens,
            "tokens_per_tree": round(trees.acceptance_length or 1.0, 3),
            "itl_p99_ms": found.itl_p99,
            **{
                name: int(total(page, f"vllm:graft_learn_{metric}"))
                for name, metric in HEADS.items()
            },
        }
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def summary(self) -> dict[str, dict[str, float]]:
        """Medians of each phase; of that with a trainer also those of its last quarter."""
        phases: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            phases.setdefault(row["phase"], []).append(row)
        if taught := phases.get("training"):
            phases["training, last quarter"] = taught[-max(1, len(taught) // 4) :]
        keys = ("tokens_per_second", "tokens_per_tree", "itl_p99_ms")
        return {
            name: {key: round(median(row[key] for row in rows), 3) for key in keys}
            for name, rows in phases.items()
        }


def serve(arguments: argparse.Namespace, head: Path) -> VllmServer:
    """The server on the first card."""
    folder = arguments.out
    learn = {"record": str(folder / "traffic"), "follow": str(folder / "heads")}
    # Trees have as many nodes all the time, so that tokens per tree say how good the head is.
    tree = {"topk": 4, "nodes": arguments.nodes, "ngram": arguments.ngram}
    draft = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 6}
    flags = [str(arguments.pair / "target"), "--served-model-name", MODEL, *arguments.server_flags]
    flags += ["--speculative-config", json.dumps(draft), "--no-enable-prefix-caching"]
    flags += ["--additional-config", json.dumps({"graft": {"tree": tree, "learn": learn}})]
    environment = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": str(arguments.cards[0])}
    return VllmServer(flags, folder / "server.log", environment, VLLM)


def learn(arguments: argparse.Namespace, head: Path) -> subprocess.Popen[bytes]:
    """The trainer on the second card."""
    folder = arguments.out
    words = [sys.executable, "-P", "-m", "vllm_graft", "learn", str(arguments.pair / "target")]
    words += ["--from-traffic", str(folder / "traffic"), "--head", str(head)]
    words += ["--publish", str(folder / "heads"), *arguments.learner]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(arguments.cards[-1])}
    with (folder / "learn.log").open("wb") as log:
        return subprocess.Popen(words, env=environment, stdout=log, stderr=log)


def run(arguments: argparse.Namespace) -> None:
    """Run all phases, and print the medians of each."""
    head = (arguments.head or arguments.pair / "eagle3").resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{arguments.workload}.jsonl"
    count = ["--count", str(arguments.texts), "--data", str(arguments.data)]
    write_workload([arguments.workload, "--out", str(file), *count])
    load = load_of(arguments.pair, ["chat", f"{arguments.workload}={file}"], arguments.out)
    with serve(arguments, head) as server:
        server.wait_ready(arguments.start_seconds)
        course = Course(server, load, arguments.requests)
        before, after = (
            Cell(arguments.temperature, arguments.batch, workload=name)
            for name in ("chat", arguments.workload)
        )
        course.cell("warm", before)
        for name, cell in (("chats", before), (arguments.workload, after)):
            for _ in range(arguments.cells):
                course.cell(name, cell)
        trainer = learn(arguments, head)
        end = time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < end:
            course.cell("training", after)
        trainer.send_signal(signal.SIGINT)
        try:
            trainer.wait(60)
        except subprocess.TimeoutExpired:
            trainer.kill()
        for _ in range(arguments.cells):
            course.cell("chats again", before)
    print(json.dumps(course.summary(), indent=1), flush=True)


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    place = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("pair", type=Path)
    add("--head", type=Path, help="default: eagle3 in the pair")
    add("--workload", default="edits")
    add("--texts", type=int, default=600, help="requests of the workload")
    add("--data", type=Path, default=Path("data"), help="as for benchmarks.workloads")
    add("--minutes", type=float, default=10.0, help="of training")
    add("--cards", type=int, nargs="+", default=[0, 1])
    add("--batch", type=int, default=16, help="requests in flight")
    add("--requests", type=int, default=200, help="of a cell")
    add("--cells", type=int, default=4, help="of each phase without a trainer")
    add("--nodes", type=int, default=15)
    add("--temperature", type=float, default=0.0)
    add("--ngram", action="store_true")
    add("--start-seconds", type=float, default=300.0)
    add("--out", type=Path, default=Path("/tmp/shift"))
    read, flags = parser.parse_known_args(words[:place])
    read.server_flags, read.learner = flags, words[place + 1 :]
    run(read)


if __name__ == "__main__":
    main()
