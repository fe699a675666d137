"""Drafters and their targets in the shapes of an 8B model, which compute what the small ones do.

`benchmarks.real_pair.widening` explains how. What is new here is how tokens that are added stay
out of the drafts. Of a DSpark head the constant channel of the target's embedding sees to it. An
MTP module gets the constant from the embedding of each token, and at the first position, where it
reads no token, from the target's state. What it puts out it reads again at the next depth, so the
constant is to be small beside all that a norm sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.lab_heads import files
from benchmarks.real_pair.widening import (
    Shape,
    Weights,
    Widening,
    read_weights,
    wide_target_config,
    widened_config,
    write_target,
    write_weights,
)

RANK = 256
"""Rank of the bias of a wide DSpark head."""


class DrafterWidening(Widening):
    """Widens MTP modules and DSpark heads, too."""

    def module(self, weights: Weights, embedding: Tensor) -> dict[str, Tensor]:
        """Widen an MTP module of a target with this small embedding."""
        found = self.layer(weights, "", "", effect=True)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            found[f"{name}.weight"] = self.norm(weights[f"{name}.weight"])
        rms = embedding.float().pow(2).mean().sqrt().item()
        # The norm of a token divides the constant, 0.01, by a quarter of this.
        found["token_layernorm.weight"][self.channel] = rms * self.norm_scale
        found["hidden_layernorm.weight"][self.channel] = self.norm_scale / 10
        found["final_layernorm.weight"][self.channel] = 4 * self.norm_scale
        found["input_proj.weight"] = self._joining(weights["input_proj.weight"])
        return found

    def _joining(self, weight: Tensor) -> Tensor:
        """Widen the product that makes a state of a state and a token, and adds their constants."""
        small, wide = self.small.hidden, self.wide.hidden
        found = torch.zeros(wide, 2 * wide, device=self.device, dtype=self.dtype)
        found[:small] = self.reading(weight, torch.arange(small, device=self.device), small)
        for part in range(2):
            constant = part * wide + self.channel
            found[:, constant] = 0
            found[self.channel, constant] = 1
        return found

    def dspark(self, weights: Weights, rank: int) -> dict[str, Tensor]:
        """Widen a DSpark head, whose heads of attention keep their size, for they have norms.

        Raises:
            ValueError: a size would have to change that can't.
        """
        before = weights["markov_head.markov_w1.weight"]
        if self.wide.head != self.small.head or rank < before.shape[1]:
            raise ValueError(
                "heads of attention with norms keep their size, and ranks don't shrink"
            )
        found: dict[str, Tensor] = {}
        layers = {int(name.split(".")[1]) for name in weights if name.startswith("layers.")}
        for number in sorted(layers):
            place = f"layers.{number}."
            found |= self.layer(weights, place, place, effect=True)
            for name in ("q", "k"):
                key = f"{place}self_attn.{name}_norm.weight"
                found[key] = self._moved(weights[key]).to(self.dtype)
                # These norms keep their size, but the model's epsilon is now that of wide states.
                found[f"{place}self_attn.{name}_proj.weight"] *= self.norm_scale
        found["hidden_norm.weight"] = self.norm(weights["hidden_norm.weight"])
        found["norm.weight"] = self.norm(weights["norm.weight"], last=True)
        found["fc.weight"] = self.combining(weights["fc.weight"])
        wide = self.noise(self.wide.vocab, rank)
        wide[: len(before), : before.shape[1]] = self._moved(before).to(self.dtype)
        found["markov_head.markov_w1.weight"] = wide
        after = weights["markov_head.markov_w2.weight"]
        wide = torch.zeros(self.wide.vocab, rank, device=self.device, dtype=self.dtype)
        wide[: len(after), : after.shape[1]] = self._moved(after).to(self.dtype)
        found["markov_head.markov_w2.weight"] = wide
        return found


def widen_mtp(
    target: Path,
    module: Path,
    out: Path,
    wide: Shape,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write `out/target`, a wide MiMo of a Llama and an MTP module."""
    config, weights = files.read_config(target), read_weights(target)
    widening = DrafterWidening(Shape.of(config), wide, device, dtype)
    torch.manual_seed(0)
    embedding = weights["model.embed_tokens.weight"]

    def parts() -> Iterator[Weights]:
        yield from widening.target(weights)
        found = widening.module(load_file(module / "model.safetensors"), embedding)
        yield {files.MODULE + name: each for name, each in found.items()}

    biased = (dict(files.with_biases(part)) for part in parts())
    write_target(
        target, out / "target", biased, files.mimo_config(wide_target_config(config, wide))
    )


def widen_dspark(
    target: Path,
    head: Path,
    out: Path,
    wide: Shape,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write `out/target`, a wide Llama, and `out/dspark`, its head."""
    config, own = files.read_config(target), files.read_config(head)
    widening = DrafterWidening(Shape.of(config), wide, device, dtype)
    torch.manual_seed(0)
    parts = widening.target(read_weights(target))
    write_target(target, out / "target", parts, wide_target_config(config, wide))
    rank, folder = max(RANK, own["markov_rank"]), out / "dspark"
    folder.mkdir(parents=True, exist_ok=True)
    found = widening.dspark(load_file(head / "model.safetensors"), rank)
    write_weights(found, folder / "model.safetensors")
    files.write_config(folder, widened_config(own, wide) | {"markov_rank": rank})
