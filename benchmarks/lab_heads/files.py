"""Files of trained drafters, and of the targets that serve with them.

A drafter's own folder, `mtp` or `dspark`, holds its weights in bfloat16 and a configuration. That
of a DSpark head is what vLLM loads. An MTP module is part of its target in vLLM, so that a target
of its own is made of the Llama and the module: a MiMo, whose layers are a Llama's with biases.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.lab_heads.dspark_head import MASK, DSparkHead
from benchmarks.lab_heads.mtp_module import MtpModule
from benchmarks.real_pair.head import HeadSizes
from benchmarks.real_pair.widening import read_weights

MODULE = "model.mtp_layers.0."
"""Where a MiMo's checkpoint has its module."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's configuration."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a model's configuration."""
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def stored(module: nn.Module) -> dict[str, Tensor]:
    """A drafter's weights in bfloat16."""
    return {
        name: each.detach().bfloat16().cpu().contiguous()
        for name, each in module.named_parameters()
    }


def save_module(module: MtpModule, folder: Path) -> None:
    """Write an MTP module alone."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored(module), folder / "model.safetensors", {"format": "pt"})
    write_config(folder, module.sizes.config)


def load_weights(drafter: nn.Module, folder: Path) -> None:
    """Give a drafter the weights of a folder."""
    weights = load_file(folder / "model.safetensors")
    drafter.load_state_dict({name: each.float() for name, each in weights.items()})


def load_module(folder: Path) -> MtpModule:
    """Read an MTP module in float32."""
    config = read_config(folder)
    module = MtpModule(HeadSizes.of(config, config["vocab_size"], (0,)))
    load_weights(module, folder)
    return module


def save_head(head: DSparkHead, folder: Path) -> None:
    """Write a DSpark head as vLLM loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored(head), folder / "model.safetensors", {"format": "pt"})
    sizes, aux = head.sizes, head.sizes.aux
    config = sizes.config | {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": len(head.layers),
        "block_size": head.depth,
        "sample_from_anchor": True,
        "markov_rank": head.markov_head.markov_w1.weight.shape[1],
        "dflash_config": {
            "mask_token_id": MASK,
            # vLLM counts the layer whose output is read, and we the one whose input is.
            "target_layer_ids": [layer - 1 for layer in aux],
            "causal": False,
        },
    }
    for key in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids"):
        del config[key]
    write_config(folder, config)


def load_head(folder: Path) -> DSparkHead:
    """Read a DSpark head in float32."""
    config = read_config(folder)
    aux = [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
    head = DSparkHead(
        HeadSizes.of(config, config["vocab_size"], aux),
        config["block_size"],
        config["num_hidden_layers"],
        config["markov_rank"],
    )
    load_weights(head, folder)
    return head


def mimo_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a MiMo that computes what a Llama of this configuration computes.

    Raises:
        ValueError: the Llama has biases, or heads of a size that vLLM's Qwen2 would not give them.
    """
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError("a Llama with biases is not what is written as a MiMo")
    if not fits_a_mimo(config):
        raise ValueError(
            f"heads of {config['head_dim']} need hidden states of that times their number "
            f"({config['num_attention_heads']}), not {config['hidden_size']}: widen the target"
        )
    # Transformers has no configuration of MiMo's; vLLM goes by the architecture's name.
    changed = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2"}
    return {**config, **changed, "num_nextn_predict_layers": 1, "use_sliding_window": False}


def fits_a_mimo(config: Mapping[str, Any]) -> bool:
    """Whether heads have the size that vLLM's Qwen2 computes: it does not read `head_dim`."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return bool((config.get("head_dim") or hidden // heads) * heads == hidden)


def with_biases(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights of a Llama, and the biases of a Qwen2, which are zero."""
    for name, each in weights.items():
        yield name, each
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            yield name.replace(".weight", ".bias"), each.new_zeros(len(each))


def write_mimo(target: Path, module: Path, out: Path) -> None:
    """Write `out`, a MiMo of a Llama and an MTP module, with the Llama's tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    weights = read_weights(target)
    parts = {MODULE + name: each for name, each in load_file(module / "model.safetensors").items()}
    found = dict(with_biases({**weights, **parts}))
    save_file(found, out / "model.safetensors", {"format": "pt"})
    write_config(out, mimo_config(read_config(target)))
    copy_tokenizer(target, out)


def copy_tokenizer(target: Path, out: Path) -> None:
    """Copy what belongs to a target beside its weights and its configuration."""
    for file in target.iterdir():
        index = file.name.endswith(".index.json")
        if file.suffix in (".json", ".jinja") and not index and not (out / file.name).exists():
            shutil.copy(file, out / file.name)


def add_noise(folder: Path, out: Path, seed: int = 0) -> None:
    """Write a drafter like that in `folder` with random matrices: a control."""
    out.mkdir(parents=True, exist_ok=True)
    order = torch.Generator().manual_seed(seed)
    weights = {
        name: each
        if each.ndim < 2
        else (torch.randn(each.shape, generator=order) * each.float().std()).to(each.dtype)
        for name, each in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", out / "config.json")
