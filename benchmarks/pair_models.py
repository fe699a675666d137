"""A small Llama and its EAGLE-3 head in plain torch, for `tree_lengths.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from vllm_graft.bench.common import report

Weights = dict[str, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes that a Llama and its draft head share.

    Attributes:
        heads: query heads.
        head: elements of a head.
        eps: of the norms.
        theta: base of the rotations.
        stretch: how many times longer contexts are than in training; 1 for plain rotations.
        trained: tokens of a text in training.
    """

    heads: int
    head: int
    eps: float
    theta: float
    stretch: float = 1.0
    trained: int = 0

    def norm(self, states: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        mean = states.pow(2).mean(-1, keepdim=True)
        return states * torch.rsqrt(mean + self.eps) * weight

    def rotated(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotate `states` ``[..., heads, head]`` by their `positions` ``[...]`` (RoPE)."""
        angles = positions[..., None, None] * self._frequencies()
        left, right = states.chunk(2, -1)
        factor = 0.1 * math.log(self.stretch) + 1.0
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def _frequencies(self) -> Tensor:
        """Radians a position, ``[head / 2]``; stretched ones as YaRN has them (arXiv:2309.00071).

        What turns 32 times or more within a text of training stays, what turns once or less is
        slowed down by the stretch, and what lies between is mixed.
        """
        plain = self.theta ** -(torch.arange(0, self.head, 2) / self.head)
        if self.stretch == 1.0:
            return plain

        def pair_that_turns(times: float) -> float:
            turns = math.log(self.trained / (times * 2 * math.pi))
            return self.head * turns / (2 * math.log(self.theta))

        first = max(math.floor(pair_that_turns(32.0)), 0)
        last = min(math.ceil(pair_that_turns(1.0)), self.head - 1)
        slowed = ((torch.arange(self.head // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
        return plain * (1 - slowed) + plain / self.stretch * slowed

    def attended(
        self, states: Tensor, weights: Weights, layer: str, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Attention's output; `attend` gets queries ``[..., heads, head]``, one K and V head."""
        q, k, v = (
            F.linear(states, weights[f"{layer}self_attn.{name}_proj.weight"]) for name in "qkv"
        )
        q = self.rotated(q.unflatten(-1, (self.heads, self.head)), positions)
        k = self.rotated(k.unflatten(-1, (1, self.head)), positions).squeeze(-2)
        return F.linear(attend(q, k, v).flatten(-2), weights[f"{layer}self_attn.o_proj.weight"])

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Logits ``[..., queries, keys]`` of ``[..., queries, head]`` and ``[..., keys, head]``."""
        return q @ k.mT / math.sqrt(self.head)

    def seen(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """Attend from queries ``[..., queries, heads, head]`` to K and V ``[..., keys, head]``.

        `hidden` is bool ``[queries, keys]``.
        """
        logits = self.logits(q.transpose(-3, -2), k.unsqueeze(-3))
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        return (weights @ v.unsqueeze(-3)).transpose(-3, -2)

    def layer(
        self,
        states: Tensor,
        inputs: Tensor,
        weights: Weights,
        layer: str,
        positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Return `states` after a layer whose attention gets `inputs`, already normed."""
        states = states + self.attended(inputs, weights, layer, positions, attend)
        normed = self.norm(states, weights[f"{layer}post_attention_layernorm.weight"])
        return states + mlp(normed, weights, layer)


def read_weights(folder: Path) -> Weights:
    """Read all weights of a checkpoint, as float32."""
    return {
        name: each.float() if each.is_floating_point() else each
        for file in sorted(folder.glob("*.safetensors"))
        for name, each in load_file(file).items()
    }


def mlp(states: Tensor, weights: Weights, layer: str) -> Tensor:
    """A Llama's feed-forward layer."""
    gate, up, down = (weights[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(states, gate)) * F.linear(states, up), down)


class Llama:
    """The target: it runs passes over tokens that follow the ones it has seen.

    Attributes:
        aux: layers whose inputs the head reads.
    """

    def __init__(self, pair: Path, stretch: float = 1.0, trained: int = 1024) -> None:
        folder = pair / "target"
        config = json.loads((folder / "config.json").read_text())
        if config["num_key_value_heads"] != 1:
            raise report.BenchmarkError(f"{folder}: one K/V head is what this script computes")
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.sizes = Sizes(
            config["num_attention_heads"],
            config["head_dim"],
            config["rms_norm_eps"],
            theta,
            stretch,
            trained,
        )
        self.layers = config["num_hidden_layers"]
        chosen = json.loads((pair / "eagle3" / "config.json").read_text())
        # vLLM reads these layers where the head's configuration names none.
        usual = [2, self.layers // 2, self.layers - 3]
        self.aux = chosen.get("eagle_aux_hidden_state_layer_ids", usual)
        self.weights = read_weights(folder)
        self.embed = self.weights["model.embed_tokens.weight"]

    def run(self, tokens: Tensor, seen: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Logits ``[texts, tokens, vocab]`` and inputs of the head ``[texts, tokens, 3 * hidden]``.

        `seen` has K and V ``[texts, seen, head]`` per layer, or nothing; K/V of `tokens` is
        appended.
        """
        first = seen[0][0].shape[1] if seen else 0
        count, fresh, aux = tokens.shape[1], not seen, []
        positions = (first + torch.arange(count)).expand(tokens.shape)
        states = self.embed[tokens]
        hidden = torch.arange(first + count) > (first + torch.arange(count))[:, None]
        for number in range(self.layers):
            if number in self.aux:
                aux.append(states)

            def attend(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
                if fresh:
                    seen.append((k, v))
                else:
                    old = seen[number]
                    seen[number] = torch.cat((old[0], k), 1), torch.cat((old[1], v), 1)
                return self.sizes.seen(q, *seen[number], hidden)

            layer = f"model.layers.{number}."
            normed = self.sizes.norm(states, self.weights[f"{layer}input_layernorm.weight"])
            states = self.sizes.layer(states, normed, self.weights, layer, positions, attend)
        normed = self.sizes.norm(states, self.weights["model.norm.weight"])
        return F.linear(normed, self.weights["lm_head.weight"]), torch.cat(aux, -1)


@dataclass(frozen=True)
class Text:
    """A prompt and the target's answer to it.

    Attributes:
        tokens: int64 ``[length]``.
        aux: ``[length, 3 * hidden]``, the states of the target that the head reads.
        noise: ``[length + some, vocab]``, the noise of the draw after each place; None for greedy.
        prompt: tokens of the prompt.
    """

    tokens: Tensor
    aux: Tensor
    noise: Tensor | None
    prompt: int


def write(target: Llama, prompts: Tensor, count: int, temperature: float) -> list[Text]:
    """Generate `count` tokens after each of `prompts` int64 ``[texts, prompt]``."""
    texts, prompt = prompts.shape
    noise: list[Tensor] = []
    if temperature > 0:
        for seed in range(texts):
            generator = torch.Generator().manual_seed(seed)
            uniform = torch.rand(prompt + count, len(target.embed), generator=generator)
            noise.append(-(-uniform.clamp_(1e-9, 1 - 1e-7).log()).log())
    seen: list[tuple[Tensor, Tensor]] = []
    tokens, fresh = prompts, prompts
    for place in range(prompt - 1, prompt + count - 1):
        logits = target.run(fresh, seen)[0][:, -1]
        if noise:
            logits = logits / temperature + torch.stack([each[place] for each in noise])
        fresh = logits.argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, fresh), 1)
    aux = target.run(tokens, [])[1]
    return [
        Text(tokens[i], aux[i], noise[i] if noise else None, prompt) for i in range(len(tokens))
    ]


BLOCK = 16
"""Tokens of a block of vLLM's K/V cache."""


def outside(keys: Tensor, ends: Tensor, window: int) -> Tensor:
    """Which keys are neither in a text's first block nor in a window of the draft, as bool.

    Args:
        keys: positions ``[keys]``.
        ends: positions ``[..., 1]`` of what is right behind a window.
        window: tokens, as ``graft.tree.draft_window``; 0 for all.
    """
    first = (ends - window).clamp(min=0) // BLOCK * BLOCK
    return (keys >= BLOCK) & (keys < first) if window else torch.zeros_like(keys < ends)


class Head:
    """An EAGLE-3 head over a text (arXiv:2503.01840).

    Args:
        weights: of the head.
        target: whose states it reads.
        text: the text.
        window: tokens before a row that it sees, besides the first block; 0 for all.
    """

    def __init__(self, weights: Weights, target: Llama, text: Text, window: int = 0) -> None:
        self.window = window
        self.sizes, self.embed, self.text = target.sizes, target.embed, text
        self.weights, offsets = weights, weights["d2t"]
        self.ids = torch.arange(len(offsets)) + offsets
        count = len(text.tokens) - 1
        self.places = torch.arange(count)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.k, self.v = k, v
            rows = self.places[:, None]
            hidden = (self.places > rows) | outside(self.places, rows, window)
            return self.sizes.seen(q, k, v, hidden)

        states = F.linear(text.aux[:count], self.weights["fc.weight"])
        # A row gets the token after its place.
        self.states, self.logits = self.run(text.tokens[1:], states, self.places, attend)

    def run(
        self, tokens: Tensor, states: Tensor, places: Tensor, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Return the states to go on from, and logits of the draft's vocabulary."""
        weights, layer = self.weights, "midlayer."
        both = (
            self.sizes.norm(self.embed[tokens], weights[f"{layer}input_layernorm.weight"]),
            self.sizes.norm(states, weights[f"{layer}hidden_norm.weight"]),
        )
        states = self.sizes.layer(states, torch.cat(both, -1), weights, layer, places, attend)
        normed = self.sizes.norm(states, weights["norm.weight"])
        return states, F.linear(normed, weights["lm_head.weight"])

    def best(
        self, logits: Tensor, places: Tensor, topk: int, temperature: float, sharpness: float
    ) -> tuple[Tensor, Tensor]:
        """Return scores and tokens ``[..., topk]`` of rows at `places`, as `DraftHead.top` does."""
        logits = logits * sharpness
        if self.text.noise is not None:
            drawn = (places + 1).clamp(max=len(self.text.noise) - 1)
            logits = logits / temperature + self.text.noise[drawn][..., self.ids]
        scores, rows = logits.log_softmax(-1).topk(topk)
        return scores, self.ids[rows]
