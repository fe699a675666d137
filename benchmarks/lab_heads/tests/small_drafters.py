"""A small Llama with drafters of both kinds, random or trained for a moment."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.lab_heads import files
from benchmarks.lab_heads.dspark_head import DSparkHead
from benchmarks.lab_heads.mtp_module import MtpModule
from benchmarks.real_pair.head import HeadSizes
from benchmarks.real_pair.widening import Shape
from benchmarks.tests import small_targets
from benchmarks.tests.small_targets import with_norms

SMALL = Shape(48, 80, 6, 2, 16, 6, 96)
WIDE = Shape(256, 192, 16, 4, 16, 7, 160)
AUX = (1, 3, 5)


def write_target(folder: Path, tied: bool = False) -> None:
    """A random Llama whose norms have weights of their own."""
    small_targets.write_target(folder, SMALL, tied=tied)


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
