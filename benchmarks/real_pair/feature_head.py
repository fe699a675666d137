"""An EAGLE-1 head (arXiv:2401.15077) that is trained, and the files that vLLM loads it from.

It reads the target's last states, drafts the states that follow them, and has the target's own
embedding and output layer. vLLM's `EagleLlamaForCausalLM` reads rows of the embedding as they are
stored: a Gemma's own factor, the root of its hidden size, is not in them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.real_pair.head import Attention, FeedForward, HeadSizes, Past, shifted


@dataclass(frozen=True)
class Scales:
    """What states and rows of the embedding are divided by in training, so that they are near 1.

    Weights that are stored read and add undivided ones.
    """

    states: float = 1.0
    embeds: float = 1.0

    @classmethod
    def of(cls, states: Tensor, embedding: Tensor) -> Scales:
        """Root mean squares of some states and of an embedding."""
        parts = (each.float().pow(2).mean().sqrt().item() for each in (states, embedding))
        return cls(*parts)


class Layer(nn.Module):
    """A Llama's layer without an input norm: the head's only layer has none."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, sizes.hidden)
        self.mlp = FeedForward(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def forward(self, states: Tensor, past: Past) -> Tensor:
        states = states + self.self_attn(states, past)
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class FeatureHead(nn.Module):
    """The head. Its parameters have the names that vLLM's `EagleLlamaForCausalLM` loads.

    Attributes:
        outputs: ``[tokens, hidden]``, rows of the target's output layer, which is not trained.
    """

    regression = 1.0
    """Weight of the distance to the target's states, beside that of the distributions."""

    def __init__(self, sizes: HeadSizes, outputs: Tensor, scales: Scales = Scales()) -> None:
        super().__init__()
        self.sizes, self.scales = sizes, scales
        self.fc = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(sizes)])
        self.outputs: Tensor
        self.register_buffer("outputs", outputs.float(), persistent=False)

    def forward(self, aux: Tensor, embeds: Tensor, passes: int) -> list[Tensor]:
        """Return states ``[texts, length, hidden]`` of each pass.

        `aux` ``[texts, length, hidden]`` has the target's last states at place i, `embeds` the
        stored embedding of the token after it. What comes out at i is the state of that token. A
        pass reads the states of the pass before, as drafting does.
        """
        states, embeds = aux / self.scales.states, embeds / self.scales.embeds
        past: Past = []
        found = []
        for _ in range(passes):
            states = self.layers[0](self.fc(torch.cat((embeds, states), -1)), past)
            found.append(states * self.scales.states)
            states = shifted(states, 1)
        return found

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[rows, tokens]`` of states ``[rows, hidden]``."""
        return F.linear(states, self.outputs)

    def distance(self, states: Tensor, wanted: Tensor) -> Tensor:
        """How far states are from the target's, both ``[rows, hidden]``."""
        return F.smooth_l1_loss(states / self.scales.states, wanted / self.scales.states)

    def begin(self, fc: Tensor) -> None:
        """Have a new head draft nearly what `fc` ``[hidden, 2 * hidden]`` alone would draft."""
        with torch.no_grad():
            self.fc.weight.copy_(fc)
            self.layers[0].self_attn.o_proj.weight.mul_(0.1)
            self.layers[0].mlp.down_proj.weight.mul_(0.1)


class LeastSquares:
    """The best linear guess of a state from the state before and the token between, by sums."""

    def __init__(self, hidden: int, scales: Scales) -> None:
        self.scales = scales
        self.inner = torch.zeros(2 * hidden, 2 * hidden)
        self.outer = torch.zeros(2 * hidden, hidden)
        self.rows = 0

    def add(self, aux: Tensor, embeds: Tensor, states: Tensor) -> None:
        """Take rows ``[rows, hidden]`` of a lesson."""
        given = torch.cat((embeds / self.scales.embeds, aux / self.scales.states), -1).cpu()
        self.inner += given.mT @ given
        self.outer += given.mT @ (states.cpu() / self.scales.states)
        self.rows += len(given)

    def solve(self, ridge: float = 0.01) -> Tensor:
        """Weights ``[hidden, 2 * hidden]`` for a head's `fc`; inputs have a size near 1."""
        penalty = ridge * max(1, self.rows) * torch.eye(len(self.inner))
        found: Tensor = torch.linalg.solve(self.inner + penalty, self.outer)
        return found.mT


def stored_weights(head: FeatureHead) -> dict[str, Tensor]:
    """Weights for states and embeddings that are not divided."""
    states, embeds = head.scales.states, head.scales.embeds
    found = {name: each.detach().float() for name, each in head.named_parameters()}
    own = head.sizes.hidden
    fc = found["fc.weight"]
    found["fc.weight"] = torch.cat((fc[:, :own] * (states / embeds), fc[:, own:]), 1)
    for name in found:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            found[name] = found[name] / states
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = found[name] * states
    return found


def save_feature_head(head: FeatureHead, folder: Path) -> None:
    """Write a head in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: each.bfloat16().cpu().contiguous() for name, each in stored_weights(head).items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = {
        key: value
        for key, value in head.sizes.config.items()
        if key not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    }
    config["architectures"] = ["EagleLlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def load_feature_head(folder: Path, outputs: Tensor) -> FeatureHead:
    """Read a head in float32."""
    config = json.loads((folder / "config.json").read_text())
    head = FeatureHead(HeadSizes.of(config, config["vocab_size"]), outputs)
    weights = load_file(folder / "model.safetensors")
    head.load_state_dict({name: each.float() for name, each in weights.items()})
    return head
