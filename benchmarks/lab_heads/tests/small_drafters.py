"""A small Llama with drafters of both kinds, random or trained for a moment."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.lab_heads import files
from benchmarks.lab_heads.dspark_head import DSparkHead
from benchmarks.lab_heads.mtp_module import MtpModule
from benchmarks.real_pair.head import HeadSizes
from benchmarks.real_pair.widening import Shape

SMALL = Shape(48, 80, 6, 2, 16, 6, 96)
WIDE = Shape(256, 192, 16, 4, 16, 7, 160)
AUX = (1, 3, 5)


def write_target(folder: Path, tied: bool = False) -> None:
    """A random Llama whose norms have weights of their own."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL.config,
        num_hidden_layers=SMALL.layers,
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


def sizes_of(folder: Path, aux: tuple[int, ...] = AUX) -> HeadSizes:
    """Sizes of drafters of a target."""
    config = files.read_config(folder)
    return HeadSizes.of(config, config["vocab_size"], aux)


def random_module(folder: Path) -> MtpModule:
    """A random MTP module of a target."""
    torch.manual_seed(1)
    module = MtpModule(sizes_of(folder, (0,)))
    with_norms(module)
    return module


def random_head(folder: Path, depth: int = 4, rank: int = 8) -> DSparkHead:
    """A random DSpark head of a target, whose bias counts."""
    torch.manual_seed(2)
    head = DSparkHead(sizes_of(folder), depth, 2, rank)
    with_norms(head)
    return head
