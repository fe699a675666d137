"""Small checkpoints on disk, and other weights in their place."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from vllm_graft.testing.models.llama import write_checkpoint

_BARE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
"""A Llama that is configured and never loaded."""


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(40, 64, generator=generator) for n in range(20)}


def keep_time(path: Path) -> None:
    """Keep the time of modification at one value, as a tool that preserves times would."""
    os.utime(path, ns=(0, 0))


def write_parts(folder: Path) -> Path:
    """Write a checkpoint of two files, each with twenty tensors; return its folder."""
    for part in range(2):
        file = folder / f"model-{part}.safetensors"
        save_file({f"{part}.{name}": one for name, one in tensors(part).items()}, file)
        keep_time(file)
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    return folder


def change_a_tensor(path: Path) -> None:
    """Write other numbers into one tensor."""
    content = {f"0.{name}": one for name, one in tensors(0).items()}
    content["0.layer.7"] += 0.01
    save_file(content, path / "model-0.safetensors")


def write_likeness(source: Path, folder: Path, noise: float = 0.05, seed: int = 3) -> Path:
    """Copy what `write_llama` wrote with noise in its matrices: a draft that is often right.

    The noise's deviation is ``noise`` times that of each matrix.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor
        if tensor.ndim < 2
        else tensor + torch.randn(tensor.shape, generator=generator) * tensor.std() * noise
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    write_checkpoint(folder, weights, json.loads((source / "config.json").read_text()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    return folder


def write_vocabulary(
    folder: Path,
    tokens: Mapping[str, Any],
    form: Literal["pairs", "list", "vocab.json"] = "pairs",
    added: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the vocabulary of a tokenizer in one of the forms that there are.

    Args:
        tokens: each token's id.
        added: tokens that were added, as the file has them.
    """
    folder.mkdir(exist_ok=True)
    if form == "vocab.json":
        (folder / form).write_text(json.dumps(tokens))
        return
    by_id = sorted(tokens, key=lambda token: int(tokens[token])) if form == "list" else []
    vocabulary = [[token, -1.0] for token in by_id] if form == "list" else tokens
    whole = {"added_tokens": list(added), "model": {"vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(whole))


def write_configs(folder: Path) -> tuple[Path, Path]:
    """Write a target and an EAGLE-3 head without weights; returns their folders."""
    draft = {**_BARE, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    configs = {"target": _BARE, "draft": {**draft, "draft_vocab_size": 64}}
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / "target", folder / "draft"


def with_noise(weight: torch.Tensor) -> torch.Tensor:
    """A matrix that is still a little like what it was."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)).to(weight)
    return weight + 0.7 * weight.float().std().to(weight) * noise


def write_changed(
    source: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]
) -> Path:
    """Copy a checkpoint of one file with other matrices."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    for name, each in weights.items():
        if each.is_floating_point() and each.ndim == 2:
            weights[name] = change(each)
    save_file(weights, folder / "model.safetensors")
    return folder
