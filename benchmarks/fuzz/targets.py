"""Models that are served: the pair's target, other weights, another rotation, adapters."""

from __future__ import annotations

import base64
import functools
import io
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.engines.shipped_pair import SHIPPED
from tests.support.models.lora_adapters import write_adapter
from tests.support.models.mtp_targets import ONE_LAYER, write_glm4_moe

ORIGINAL = SHIPPED / "target"


@dataclass(frozen=True)
class Target:
    """A model, served by an arm and by the reference alike.

    Attributes:
        flags: makes the flags, that of the checkpoint first, given a folder for files.
        world: attributes of the requests' `World` that are other than the pair's.
    """

    flags: Callable[[Path], list[str]]
    world: Mapping[str, Any] = field(default_factory=dict)


def noisy(folder: Path) -> Path:
    """Write the pair's target with other weights, unless it is there; return its folder."""
    import torch
    from safetensors.torch import load_file, save_file

    there = folder / "noisy"
    if not there.exists():
        shutil.copytree(ORIGINAL, there)
        weights = load_file(ORIGINAL / "model.safetensors")
        numbers = torch.Generator().manual_seed(0)
        for name, each in weights.items():
            if each.ndim == 2:
                noise = torch.randn(each.shape, generator=numbers)
                weights[name] = (each + 0.25 * each.float().std() * noise).to(each.dtype)
        save_file(weights, there / "model.safetensors", metadata={"format": "pt"})
    return there


def _rotated(folder: Path) -> list[str]:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    return [str(ORIGINAL), "--hf-overrides", json.dumps({"rope_parameters": rope})]


def _rich(folder: Path) -> list[str]:
    places = {name: folder / name for name in ("one", "two")}
    for seed, (name, place) in enumerate(places.items()):
        if not place.exists():
            write_adapter(place, str(ORIGINAL), seed, head=name == "one")
    modules = [f"{name}={place}" for name, place in places.items()]
    # On a CPU vLLM computes requests without an adapter with the last slot, so one is left empty.
    lora = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-modules", *modules]
    reasoning = {"reasoning_start_str": "return", "reasoning_end_str": "\n"}
    return [
        str(ORIGINAL), *lora, "--enable-prompt-embeds", "--reasoning-config", json.dumps(reasoning)
    ]  # fmt: skip


def _experts(folder: Path) -> list[str]:
    there = folder / "experts"
    if not there.exists():
        vocabulary = json.loads((ORIGINAL / "config.json").read_text())["vocab_size"]
        shape = replace(ONE_LAYER, vocab_size=vocabulary)
        write_glm4_moe(there, shape, from_states=0.2)
    return [str(there), "--tokenizer", str(ORIGINAL)]


def embedded(ids: list[int]) -> str:
    """Return embeddings of token ids, float32 [tokens, hidden], as a request has them."""
    import torch

    buffer = io.BytesIO()
    torch.save(_table()[ids].clone(), buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@functools.cache
def _table() -> Any:
    from safetensors.torch import load_file

    return load_file(ORIGINAL / "model.safetensors")["model.embed_tokens.weight"].float()


TARGETS: dict[str, Target] = {
    "pair": Target(lambda folder: [str(ORIGINAL)]),
    "noisy": Target(lambda folder: [str(noisy(folder))]),
    "rotated": Target(_rotated),
    "experts": Target(_experts),
    "rich": Target(_rich, {"adapters": ("one", "two"), "embed": embedded, "thinks": True}),
}
"""By name; `experts` has an MTP module, `rich` is the pair with LoRA, embeddings of prompts, and
thinking budgets."""
