"""Acceptance lengths of trees and chains of a DSpark head, in float32, without an engine.

It computes what `spec_decode/drafters/block` does, on texts that the target writes with known
noise, as `benchmarks.tree_lengths` does for EAGLE-3 heads. So it tells what an engine ought to
accept, whatever a GPU's kernels and graphs make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lab_heads.dspark_head import MASK, DSparkHead
from benchmarks.lab_heads.files import load_head
from benchmarks.pair_models import Llama, Text, write
from benchmarks.tree_lengths import BEYOND, Candidates, mean_length, read_prompts
from vllm_graft.base import markdown
from vllm_graft.spec_decode.heads.head import SHARPNESS


@dataclass(frozen=True)
class Blocks:
    """What a head says at several places of a text.

    Attributes:
        head: the head.
        text: the text.
        starts: int64 ``[trees]``, places of the roots.
        logits: ``[trees, positions, vocab]``, before the bias by the token before.
    """

    head: DSparkHead
    text: Text
    starts: Tensor
    logits: Tensor

    @classmethod
    def of(cls, target: Llama, head: DSparkHead, text: Text, depth: int) -> Blocks:
        """Run blocks of `depth` positions from all places behind the prompt but the last few."""
        starts = torch.arange(text.prompt, len(text.tokens) - depth - 1)
        whole, head.depth = head.depth, depth
        try:
            embeds = target.embed[text.tokens[starts]]
            states = head(text.aux[None], embeds[None], target.embed[MASK], starts[None])[0]
        finally:
            head.depth = whole
        return cls(head, text, starts, F.linear(states, target.weights["lm_head.weight"]))

    def biased(self, level: int, before: Tensor) -> Tensor:
        """Logits ``[trees, nodes, vocab]`` of a level behind tokens ``[trees, nodes]``."""
        found: Tensor = self.logits[:, level, None] + self.head.markov_head(before)
        return found

    def best(
        self, level: int, before: Tensor, topk: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Scores and tokens ``[trees, nodes, topk]``, ranked with the noise of the draw."""
        logits = self.biased(level, before) * SHARPNESS
        if self.text.noise is not None:
            logits = logits / temperature + self.text.noise[self.starts + level, None]
        scores, tokens = logits.log_softmax(-1).topk(topk)
        return scores, tokens

    def grow(self, topk: int, temperature: float) -> Candidates:
        """Grow a tree as deep as the blocks from each place."""
        truth = F.pad(self.text.tokens, (0, 1), value=BEYOND)
        roots = self.text.tokens[self.starts, None]
        score, tokens = (each[:, 0] for each in self.best(0, roots, topk, temperature))
        right = tokens == truth[self.starts + 1, None]
        scores, rights = [score], [right]
        for level in range(1, self.logits.shape[1]):
            gained, children = self.best(level, tokens, topk, temperature)
            hit = right[..., None] & (children == truth[self.starts + level + 1, None, None])
            scores.append((score[..., None] + gained).flatten(1))
            rights.append(hit.flatten(1))
            score, picked = scores[-1].topk(topk, 1)
            tokens, right = children.flatten(1).gather(1, picked), rights[-1].gather(1, picked)
        return Candidates(torch.cat(scores, 1), torch.cat(rights, 1))

    def chain(self, truth: Tensor, temperature: float) -> Tensor:
        """Chance ``[trees, positions]`` that rejection accepts a chain's drafts up to each.

        Args:
            truth: the target's logits ``[length, vocab]``.
            temperature: above 0, of draft and target.
        """
        chances = []
        for level in range(self.logits.shape[1]):
            places = self.starts + level
            drafted = self.biased(level, self.text.tokens[places, None])[:, 0]
            both = ((each / temperature).softmax(-1) for each in (drafted, truth[places]))
            chances.append(torch.minimum(*both).sum(-1))
        return torch.stack(chances, 1).cumprod(1)


@dataclass
class Lengths:
    """Rows of the table: a shape or chain, and its mean acceptance length by temperature."""

    rows: dict[str, dict[float, float]] = field(default_factory=dict)

    def add(self, name: str, temperature: float, length: float) -> None:
        self.rows.setdefault(name, {})[temperature] = length

    def table(self, temperatures: Sequence[float]) -> str:
        """Lay them out."""
        lines = [
            [name, *(f"{found[each]:.3f}" if each in found else "-" for each in temperatures)]
            for name, found in self.rows.items()
        ]
        return markdown.table(
            ["topk, steps, nodes", *(f"{each:g}" for each in temperatures)], lines
        )


def measure(
    pair: Path,
    folder: Path,
    shapes: Sequence[tuple[int, int, int]],
    chains: Sequence[int],
    temperatures: Sequence[float],
    *,
    texts: int,
    prompt: int,
    tokens: int,
) -> Lengths:
    """Compute mean acceptance lengths, each tree from where the one before ended.

    Args:
        pair: has `target` and `prompts.json`.
        folder: the head.
        shapes: topk, steps and nodes of trees, whose blocks have `steps` positions.
        chains: lengths of chains that are sampled and verified by rejection, token by token: an
            estimate, as it follows the texts. None at temperature 0.
        temperatures: of the texts.
        texts: how many are written, at most.
        prompt: tokens of a prompt.
        tokens: how many are written behind it.
    """
    head, target, found = load_head(folder).eval(), Llama(pair), Lengths()
    target.aux = list(head.sizes.aux)
    prompts = read_prompts(pair, texts, prompt)
    for temperature in temperatures:
        written = write(target, prompts, tokens, temperature)
        for topk, steps, nodes in shapes:
            grown = [
                Blocks.of(target, head, text, steps).grow(topk, temperature).lengths(nodes)
                for text in written
            ]
            found.add(f"{topk}, {steps}, {nodes}", temperature, mean_length(*grown))
        for length in chains if temperature else []:
            accepted = [
                Blocks.of(target, head, text, length).chain(
                    target.run(text.tokens[None], [])[0][0], temperature
                )
                for text in written
            ]
            mean = 1 + torch.cat(accepted).sum(1).mean().item()
            found.add(f"chain of {length}", temperature, mean)
    return found
