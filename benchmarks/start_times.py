"""Time starts of engines, cold and warm: our trees, compiled ahead or not, and stock's chain.

    python -m benchmarks.start_times PAIR --seconds 390 --json starts.json

PAIR holds `target/`, `eagle3/` and `prompts.json`, as `tests/pair` does. Each start is a process
of its own, one after another. A cold start finds empty caches (those of Triton, of torch's
compiler, of vLLM and of the driver); the warm start of an arm finds what its cold one has left. A
start ends with the first answer. Starts that no longer fit into `--seconds` are left out, and said.

`ahead` is ``shape: auto`` as it is, `late` the same with ``VLLM_GRAFT_COMPILE_PROCESSES=0``,
`chain` vLLM without us. Of our starts the table has the parts that `graft_info()` tells, in
seconds: listing kernels, waiting for those that are compiled ahead, compiling in the worker itself
(vLLM's kernels among them), comparing attention, capturing the draft's graphs, timing steps.
`kernels` are those that were compiled ahead, of those foretold; compiled in the worker; and found
in the cache there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_graft.base import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.engine_arms import read_arm
from vllm_graft.spec_decode.startup.begin import COMPILE_PROCESSES
from vllm_graft.spec_decode.startup.clock import PARTS

STARTS = (
    ("ahead", "cold"),
    ("ahead", "warm"),
    ("chain", "cold"),
    ("chain", "warm"),
    ("late", "cold"),
    ("late", "warm"),
)
"""What is measured, the most important first."""

_SELF = "benchmarks.start_times"

LEAST_SECONDS = 20.0
"""A start for which there is less time is not begun."""


def engine_options(arm: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of ``vllm.LLM`` that make an arm."""
    name = arguments.chain if arm == "chain" else arguments.tree
    draft = arguments.draft or arguments.pair / "eagle3"
    found = read_arm(name, draft, arguments.topk, arguments.steps, arguments.max_num_seqs)
    return {**found.options, "max_num_seqs": arguments.max_num_seqs}


def environment(arm: str, caches: Path) -> dict[str, str]:
    """An environment whose caches all lie in one folder."""
    places = {
        "TRITON_HOME": caches,
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
        "VLLM_CACHE_ROOT": caches / "vllm",
        "CUDA_CACHE_PATH": caches / "driver",
    }
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_CACHE_DIR"}
    if arm == "late":
        kept[COMPILE_PROCESSES] = "0"
    return {**kept, **{name: str(place) for name, place in places.items()}}


def start(arm: str, caches: Path, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Start an engine in a process; what it took, or why there is nothing."""
    plan = {
        "target": str(arguments.target or arguments.pair / "target"),
        "prompt": json.loads((arguments.pair / "prompts.json").read_text())[0],
        "options": engine_options(arm, arguments),
        "gpu": {
            "gpu_memory_utilization": arguments.gpu_memory_utilization,
            "max_model_len": arguments.max_model_len,
        },
    }
    with tempfile.NamedTemporaryFile("r") as out:
        command = [sys.executable, "-m", _SELF, "--child", json.dumps(plan), out.name]
        began = time.monotonic()
        with tempfile.TemporaryFile() as log:
            try:
                code = subprocess.run(
                    command, env=environment(arm, caches), stdout=log, stderr=log, timeout=seconds
                ).returncode
            except subprocess.TimeoutExpired:
                return {"why": f"not done after {seconds:.0f} s"}
            took = time.monotonic() - began
            said = out.read()
            if code or not said:
                log.seek(0)
                return {"why": log.read().decode(errors="replace")[-3000:]}
    return {"seconds": round(took, 1), **json.loads(said)}


@contextmanager
def running(target: str, options: dict[str, Any], gpu: dict[str, Any]) -> Iterator[Any]:
    """An engine in this process, on the GPU where there is one."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if torch.cuda.is_available():
        from vllm import LLM

        yield LLM(target, **options, **gpu)
        return
    from vllm_graft.testing import cpu_engine, install

    install()
    with cpu_engine(target, **options) as llm:
        yield llm


def child(plan: dict[str, Any], out: Path) -> None:
    """In a start's process: build the engine, answer once, and write what took how long."""
    began = time.monotonic()
    with running(plan["target"], plan["options"], plan["gpu"]) as llm:
        built = time.monotonic()
        from vllm import SamplingParams

        llm.generate([plan["prompt"]], SamplingParams(max_tokens=8), use_tqdm=False)
        answered = time.monotonic()
        start: dict[str, Any] = {}
        if "additional_config" in plan["options"]:
            [info] = llm.collective_rpc("graft_info")
            start = info["counters"]["tree"]["start"]
        found = {"engine": round(built - began, 1), "answer": round(answered - built, 1)}
        if start:
            found |= {
                "parts": start["seconds"],
                **{key: start[key] for key in ("kernels", "ahead")},
            }
        out.write_text(json.dumps(found))


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Make every start for which there is time."""
    end, rows = time.monotonic() + arguments.seconds, []
    for arm, kind in STARTS:
        if arm not in arguments.arms or kind not in arguments.kinds:
            continue
        left = end - time.monotonic()
        found = {"why": "no time left"}
        if left >= LEAST_SECONDS:
            found = start(arm, folder / arm, arguments, left)
        rows.append({"arm": arm, "start": kind, **found})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The starts as a table of Markdown."""
    head = ["arm", "start", "seconds", "engine", "answer", *PARTS, "kernels"]
    lines = []
    for row in rows:
        known = [str(row.get(name, "")) for name in ("arm", "start", "seconds", "engine", "answer")]
        parts = row.get("parts", {})
        lines.append([*known, *(str(parts.get(name, "")) for name in PARTS), kernels(row)])
    return markdown.table(head, lines)


def kernels(row: dict[str, Any]) -> str:
    """How many kernels were compiled where, or why there is no start."""
    if "why" in row:
        return str(row["why"]).strip().splitlines()[-1][:80]
    if "kernels" not in row:
        return ""
    counts, ahead = row["kernels"], row["ahead"]
    return (
        f"{counts['ahead']} of {ahead['foretold']} ahead, {counts['compiled']} here, "
        f"{counts['loaded']} found"
    )


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--child"]:
        child(json.loads(arguments[1]), Path(arguments[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pair", type=Path)
    parser.add_argument("--target", type=Path, help="instead of PAIR/target")
    parser.add_argument("--draft", type=Path, help="an EAGLE-3 head, instead of PAIR/eagle3")
    parser.add_argument("--arms", nargs="+", default=["ahead", "late", "chain"])
    parser.add_argument("--kinds", nargs="+", default=["cold", "warm"])
    parser.add_argument("--tree", default="auto:63", help="of `ahead` and `late`")
    parser.add_argument("--chain", default="chain:3,5,7", help="stock's")
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--seconds", type=float, default=390, help="for all starts")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(given, Path(folder))
    print(table(rows))
    if given.json:
        report.write_json(str(given.json), rows)
    return int(any("why" in row and row["why"] != "no time left" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
