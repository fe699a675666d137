"""How each kind of drafter is made: its target, its first weights, its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab_heads import files, sources
from benchmarks.lab_heads.dspark_head import DSparkHead, DSparkLesson
from benchmarks.lab_heads.learning import Lesson
from benchmarks.lab_heads.mtp_module import MtpLesson, MtpModule
from benchmarks.lab_heads.target_states import Target
from benchmarks.real_pair.head import HeadSizes
from benchmarks.real_pair.texts import Text, read_texts


@dataclass(frozen=True)
class Sizes:
    """What is chosen of a drafter.

    Attributes:
        depth: depths that are trained; None for the usual number of a kind.
        layers: layers of a DSpark head.
        rank: rank of its bias.
        share: share of the places at which an MTP module's distributions are compared.
        blocks: blocks of a DSpark head that begin in a text.
    """

    depth: int | None = None
    layers: int = 2
    rank: int = 128
    share: float = 1.0
    blocks: int = 24


@dataclass(frozen=True)
class Made:
    """A drafter before its training."""

    lesson: Lesson
    target: Target
    save: Callable[[Path], None]


def target_of(pair: Path, device: torch.device, aux: tuple[int, ...] = ()) -> Target:
    """Load the target, in bfloat16 on a GPU; a CPU is faster with float32."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(str(pair / "target"), dtype=dtype)
    return Target(model.to(device), aux)


def mtp(pair: Path, device: torch.device, sizes: Sizes) -> Made:
    """An MTP module."""
    config = files.read_config(pair / "target")
    module = MtpModule(HeadSizes.of(config, config["vocab_size"], (0,))).to(device)
    target = target_of(pair, device)
    lesson = MtpLesson(module, target, sizes.depth or 4, sizes.share)
    return Made(lesson, target, lambda folder: files.save_module(module, folder))


def dspark(pair: Path, device: torch.device, sizes: Sizes) -> Made:
    """A DSpark head that reads an early, a middle and the last layer's inputs."""
    config = files.read_config(pair / "target")
    layers = config["num_hidden_layers"]
    aux = (2, layers // 2 + 1, layers - 1) if layers > 4 else (1, layers - 1)
    own = HeadSizes.of(config, config["vocab_size"], aux)
    head = DSparkHead(own, sizes.depth or 7, sizes.layers, sizes.rank).to(device)
    target = target_of(pair, device, aux)
    lesson = DSparkLesson(head, target, sizes.blocks)
    return Made(lesson, target, lambda folder: files.save_head(head, folder))


MAKERS: Mapping[str, Callable[[Path, torch.device, Sizes], Made]] = {"mtp": mtp, "dspark": dspark}


def texts_of(pair: Path, work: Path, longest: int, written: int) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and held-out answers to measure with.

    Args:
        pair: has the target with its tokenizer.
        work: may have `answers.safetensors`.
        longest: tokens of a text.
        written: pieces of sources to learn from, beside the answers.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(pair / "target"))
    file = work / "answers.safetensors"
    own = read_texts(file) if file.exists() else []
    found = list(sources.tokenized(sources.standard_library(), tokenizer))
    pieces = sources.written_texts(found, longest)
    order = torch.Generator().manual_seed(0)
    shuffled = [pieces[place] for place in torch.randperm(len(pieces), generator=order).tolist()]
    learned = [text for text in shuffled if not text.held_out][:written]
    learned += [text for text in own if not text.held_out]
    held_out = [text for text in own if text.held_out]
    return learned, held_out or [text for text in shuffled if text.held_out]
