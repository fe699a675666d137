"""Random targets that are widened in tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real_pair.widening import Shape


def write_target(folder: Path, shape: Shape, *, tied: bool) -> None:
    """A random Llama whose norms have weights of their own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape.config,
        num_hidden_layers=shape.layers,
        rms_norm_eps=1e-3,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    target = LlamaForCausalLM(config)
    with_norms(target)
    target.save_pretrained(folder)


def with_norms(model: torch.nn.Module) -> None:
    """Give norms weights that are not 1."""
    for name, each in model.named_parameters():
        if "norm" in name:
            each.data.uniform_(0.5, 1.5)
