"""What `plan` says of models that people serve, for the page on models.

``python -m benchmarks.plan_models`` plans each of them with ``auto`` for H200s and writes
`docs/models.json`, of which `.ci/pages.py` makes the page. It takes two minutes and no GPU.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

from tests.plugin.plan.stranger_models import MISTRAL, MODELS, drafting, planned, write_models
from vllm_graft.plan.memory import ROOM

ROOT = Path(__file__).parents[1]
GPU = "H200"
FEW = 2
"""GPUs of models that are not named below."""

GPUS = {
    16: "Kimi",
    8: "DeepSeek GLM HY3 Qwen3-235B Qwen3.5-397B Mistral-Large MiniMax-M3 Step MiMo Llama-4",
    4: "MiniMax-M2",
    1: "Llama-3.1 Qwen3-8B Qwen3-VL Qwen2.5-VL Qwen3.5-9B gpt-oss-20b gemma Mistral-Small ERNIE "
    "NVIDIA",
}
"""GPUs by how the models' names begin."""

HEADS = {
    "Llama-3.1-8B-Instruct": "EAGLE3-LLaMA3.1-Instruct-8B",
    "Qwen3-8B": "Qwen3-8B-speculator.eagle3",
    "gpt-oss-20b": "gpt-oss-20b-speculator.eagle3",
}
"""Targets of which a head's configuration is here."""

DRAFTS = {*HEADS.values(), "Qwen3-0.6B"}


def gpus_of(name: str) -> int:
    found = (count for count, models in GPUS.items() if name.startswith(tuple(models.split())))
    return next(found, FEW)


def flags_of(name: str) -> list[str]:
    """Return what follows `vllm serve`, without a draft that has to be found elsewhere."""
    flags = [name, "--skip-tokenizer-init", "--trust-remote-code"]
    if (gpus := gpus_of(name)) > 1:
        flags += ["--tensor-parallel-size", str(gpus)]
    flags += MISTRAL if "dim" in MODELS[name] else []
    return flags + (drafting("eagle3", 7, model=HEADS[name]) if name in HEADS else [])


def row_of(name: str) -> dict[str, Any]:
    """Plan a model with its own module, where it has one; return its row of the page."""
    plan = planned(flags_of(name))
    drafter = HEADS.get(name, "n-grams")
    if plan["better"]:
        plan, drafter = planned(shlex.split(plan["better"][1])[2:]), "its MTP module"
    tree = next(part for part in plan["parts"] if part["name"] == "tree")
    memory = {row["what"]: row for row in plan["memory"]}
    head = re.search(r"(\S+) was public in", tree["reason"])
    tokens = re.search(r"(\d+) tokens$", memory[ROOM]["says"]) if ROOM in memory else None
    return {
        "model": name,
        "architecture": plan["target"].split(",")[0],
        "layers": plan["target"].partition(", ")[2],
        "gpus": gpus_of(name),
        "drafter": drafter,
        "head": head[1] if head else "",
        "drafts": plan["drafts"] if tree["state"] == "on" else "",
        "why": "" if tree["state"] == "on" else tree["reason"],
        "parts": [part["name"] for part in plan["parts"] if part["state"] == "on"],
        "refused": plan["refused"],
        "weights": memory["weights of the target"]["num_bytes"],
        "tokens": int(tokens[1]) if tokens else None,
    }


def main() -> None:
    os.environ |= {"VLLM_LOGGING_LEVEL": "CRITICAL", "HF_HUB_OFFLINE": "1"}
    from vllm_graft.plan.gpu import Gpu, pretend
    from vllm_graft.plan.request import inspecting

    pretend(Gpu.parse(GPU))
    with tempfile.TemporaryDirectory() as folder, inspecting():
        os.chdir(folder)
        write_models(Path(folder))
        rows = []
        for name in sorted({*MODELS} - DRAFTS, key=str.lower):
            rows.append(row_of(name))
            print(json.dumps(rows[-1]), flush=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    (ROOT / "docs" / "models.json").write_text(
        f'{{\n "gpu": "{GPU}",\n "models": [\n  {lines}\n ]\n}}\n'
    )


if __name__ == "__main__":
    main()
