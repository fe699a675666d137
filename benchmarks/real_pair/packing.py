"""How a head comes back from another machine: in matrices of 8 bits, in one file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

SCALE = ".scale"
"""Suffix of the name of a packed matrix's scales."""


def pack_head(folder: Path, file: Path) -> None:
    """Write a head with matrices of 8 bits, a scale per row, so that it travels in half the bytes.

    Its configuration is in the file's metadata.
    """
    packed = {}
    for name, each in load_file(folder / "model.safetensors").items():
        if name.endswith("weight") and each.ndim == 2:
            scale = each.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            packed[name] = (each.float() / scale).round().to(torch.int8)
            packed[f"{name}{SCALE}"] = scale
        else:
            packed[name] = each
    save_file(packed, file, {"config": (folder / "config.json").read_text()})


def expand_head(file: Path, folder: Path) -> None:
    """Write what `pack_head` packed as vLLM loads it, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(file, "pt") as packed:
        found = {name: packed.get_tensor(name) for name in packed.keys()}  # noqa: SIM118
        (folder / "config.json").write_text(packed.metadata()["config"])
    weights = {
        name: (each * found[f"{name}{SCALE}"]).bfloat16() if f"{name}{SCALE}" in found else each
        for name, each in found.items()
        if not name.endswith(SCALE)
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
