"""What `plan` says of memory, beside what an engine with dummy weights of the same shapes takes.

``python -m benchmarks.plan_memory [NAME...] [--json FILE]`` starts an engine in a process of its
own for each model (about 20 s on a GPU), and prints a line of JSON each, then a table. The exit
status is 1 if a figure is more than 5 % off. A name is a case below, or a checkpoint's folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.plugin.plan.stranger_models import EAGLE, LLAMA, MODELS, drafting, planned, write_models
from vllm_graft.base.text_table import markdown as table

TOLERANCE = 0.05
SECONDS = 120
FLAGS = [
    *("--load-format", "dummy", "--enforce-eager", "--skip-tokenizer-init"),
    *("--max-num-seqs", "64", "--max-num-batched-tokens", "2048"),
    *("--additional-config", '{"graft": {}}'),
]
"""No part of ours: weights and K/V are the same, and the engine starts sooner."""

LENGTH = ("--max-model-len", "8192")

TEXT = ["--limit-mm-per-prompt", '{"image": 0, "video": 0, "audio": 0}']
"""Without tokenizers and processors nothing but text can be served."""


@dataclass(frozen=True)
class Case:
    """A model, with as many of its layers as one GPU of 80 GiB holds; 0 for all."""

    model: str
    flags: tuple[str, ...] = ()
    layers: int = 0


MTP = drafting("mtp", 2)
CASES = {
    "gqa-eagle3": Case(LLAMA, tuple(EAGLE)),
    "window": Case("gemma-3-27b-it", tuple(TEXT), 31),
    "heads": Case("gemma-4-31B-it", tuple(TEXT), 30),
    "mla-mtp": Case("DeepSeek-R1", tuple(MTP), 5),
    "delta-mtp": Case("Qwen3.5-9B", (*MTP, *TEXT)),
    "mamba": Case("NVIDIA-Nemotron-3-Nano-30B-A3B", ("--trust-remote-code",), 26),
    "experts-mtp": Case("ERNIE-4.5-21B-A3B-PT", tuple(MTP), 14),
    "mxfp4-eagle3": Case(
        "gpt-oss-20b", tuple(drafting("eagle3", 3, model="gpt-oss-20b-speculator.eagle3"))
    ),
    "vision": Case("Qwen3-VL-8B-Instruct", ("--no-skip-tokenizer-init",)),
    "fp8-experts-mtp": Case("GLM-4.6-FP8", tuple(MTP), 8),
    "online-fp8": Case("Qwen3-32B", ("--quantization", "fp8"), 32),
    # Without its MTP modules: vLLM's configuration cuts the layer types that they ask for.
    "window-experts": Case("Step-3.5-Flash", (), 7),
}
"""A family each."""


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration with its first layers alone; their shapes stay."""
    text = config.get("text_config", config)
    whole = text["num_hidden_layers"]
    short = {**text, "num_hidden_layers": layers}
    for name, value in text.items():
        # What each layer has, in a list, where layers of a draft may follow, or as letters.
        lists = isinstance(value, list) and len(value) >= whole
        if lists or (isinstance(value, str) and len(value) == whole):
            short[name] = value[:layers]
    return {**config, "text_config": short} if text is not config else short


def write(case: Case, folder: Path) -> Path:
    """Write the configurations of a case, and for a vision tower what reads its images."""
    write_models(folder)
    target = folder / case.model
    config = MODELS[case.model]
    if case.layers:
        config = cut(config, case.layers)
    if case.model.startswith("Qwen3-VL"):
        from tests.support.vision.vision_models import write_qwen3_vl

        write_qwen3_vl(target, weights=False)
        written = json.loads((target / "config.json").read_text())
        ids = {name: value for name, value in written.items() if name.endswith("_token_id")}
        config = {**config, **ids}
    (target / "config.json").write_text(json.dumps(config))
    return target


def compared(model: str, flags: list[str]) -> dict[str, Any]:
    """Plan a server in this process, then start its engine; return the figures of both."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DEEP_GEMM_WARMUP": "skip"}
    from vllm_graft.plan.request import Request, inspecting

    began = time.monotonic()
    arguments = [model, *FLAGS, *flags]
    with inspecting():
        plan = planned(arguments)
        engine_arguments = Request.parse(arguments).engine
    if plan["refused"]:
        return {"refused": plan["refused"]}
    middle = time.monotonic()
    taken = engine_memory(engine_arguments)
    rows = plan["memory"]
    room = next((row for row in rows if row["what"] == "room for K/V"), None)
    tokens = int(room["says"].split("; ")[-1].split()[0]) if room else 0
    return {
        "planned_weights": sum(
            row["num_bytes"] for row in rows if row["what"].startswith("weights of")
        ),
        "planned_per_token": sum(row["num_bytes"] for row in rows if row["per"] == "token"),
        "planned_per_request": sum(row["num_bytes"] for row in rows if row["per"] == "request"),
        "planned_tokens_per_gib": tokens / room["num_bytes"] * 2**30 if room else 0,
        **taken,
        "plan_seconds": middle - began,
        "engine_seconds": time.monotonic() - middle,
    }


def engine_memory(arguments: Any) -> dict[str, Any]:
    """Start an engine; return its bytes as `compared` names them."""
    import torch
    from vllm.engine.llm_engine import LLMEngine
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
    from vllm.v1.kv_cache_interface import MambaSpec

    from vllm_graft.testing import model_runner

    engine = LLMEngine.from_engine_args(arguments, UsageContext.OPENAI_API_SERVER)
    runner = model_runner(SimpleNamespace(llm_engine=engine))
    cache = runner.kv_cache_config
    # Each says how large the one allocation is in which all of them lie.
    held = max(tensor.size for tensor in cache.kv_cache_tensors)
    specs = [
        getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        for group in cache.kv_cache_groups
        for name in group.layer_names
    ]
    models = [runner.model, getattr(getattr(runner, "speculator", None), "model", None)]
    parameters = {
        each.data_ptr(): each.nbytes
        for model in filter(None, models)
        for each in model.parameters()
    }
    capacity, _ = get_kv_cache_capacity(runner.vllm_config, cache)
    is_gpu = torch.cuda.is_available()
    return {
        # On a CPU vLLM keeps packed copies of some, and lets their parameters go.
        "weights": runner.model_memory_usage if is_gpu else 0,
        "parameters": sum(parameters.values()),
        "per_token": sum(
            spec.page_size_bytes // spec.block_size
            for spec in specs
            if not isinstance(spec, MambaSpec)
        ),
        "tokens_per_gib": capacity / held * 2**30 if is_gpu else 0,
        "blocks": cache.num_blocks,
        "kv_bytes": held,
    }


FIGURES = ("weights", "per_token", "tokens_per_gib")


def worst(found: dict[str, Any]) -> float:
    """Return the largest relative error of the figures that there are; 1 without any."""
    if "weights" not in found:
        return 1.0
    both = [(float(found[f"planned_{name}"]), float(found[name])) for name in FIGURES]
    return max(abs(planned / held - 1) for planned, held in both if held)


def one(name: str) -> None:
    """Print a case's line."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        case = CASES.get(name)
        model = case.model if case else name
        if case:
            write(case, Path(folder))
        print(json.dumps({"name": name, **compared(model, [*LENGTH, *case.flags] if case else [])}))
        sys.stdout.flush()
        os._exit(0)  # Nothing is to be tidied up.


def line_of(name: str) -> dict[str, Any]:
    """Run a case in a process of its own; return its line."""
    place = name if name in CASES else str(Path(name).resolve())
    command = [sys.executable, "-m", "benchmarks.plan_memory", "--one", place]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "error": f"nothing came in {SECONDS} s"}
    if done.returncode:
        return {"name": name, "error": done.stderr[-2000:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*CASES], help="cases, or folders")
    parser.add_argument("--json", type=Path, help="write the lines to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.names[0])
    lines = []
    for name in given.names:
        line = line_of(name)
        lines.append({**line, "worst": worst(line)})
        print(json.dumps(lines[-1]), flush=True)
        if given.json:
            given.json.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    head = ["case", *(f"{what}: planned, engine's" for what in FIGURES), "worst", "seconds"]
    rows = [
        [
            each["name"],
            *(f"{each.get(f'planned_{what}', 0):.4g}, {each.get(what, 0):.4g}" for what in FIGURES),
            f"{each['worst']:.1%}",
            f"{each.get('plan_seconds', 0) + each.get('engine_seconds', 0):.0f}",
        ]
        for each in lines
    ]
    print(table(head, rows))
    return int(any(each["worst"] > TOLERANCE for each in lines))


if __name__ == "__main__":
    sys.exit(main())
