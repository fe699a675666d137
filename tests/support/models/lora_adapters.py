"""Random LoRA adapters of a tiny Llama, in PEFT's format."""

import json
from pathlib import Path
from typing import Any

import torch

RANK = 4


def write_adapter(folder: Path, target: str, seed: int, *, head: bool) -> str:
    """Write an adapter of rank 4 on the queries and values of a target."""
    from safetensors.torch import save_file

    config: dict[str, Any] = json.loads((Path(target) / "config.json").read_text())
    hidden, size = config["hidden_size"], config["head_dim"]
    rows = {
        f"model.layers.{layer}.self_attn.{name}": config[heads] * size
        for layer in range(config["num_hidden_layers"])
        for name, heads in (("q_proj", "num_attention_heads"), ("v_proj", "num_key_value_heads"))
    }
    if head:
        rows["lm_head"] = config["vocab_size"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, outputs in rows.items():
        for part, shape in {"A": (RANK, hidden), "B": (outputs, RANK)}.items():
            values = 0.2 * torch.randn(shape, generator=generator)
            weights[f"base_model.model.{name}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(weights, str(folder / "adapter_model.safetensors"))
    peft = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in rows}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    return str(folder)
