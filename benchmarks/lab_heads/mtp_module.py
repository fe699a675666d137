"""An MTP module (arXiv:2412.19437) of the form of MiMo's, for a Llama, and its files for vLLM.

It reads the target's last state and the embedding of the token behind it, and its output goes to
the target's own output layer. One module is trained for all depths: what it puts out is what it
reads at the next depth, in training as in drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lab_heads.target_states import Read, Target
from benchmarks.real_pair.head import Attention, FeedForward, HeadSizes, Past, shifted

DECAY = 0.8
"""Weight of a depth's loss over that of the depth before."""

REGRESSION = 0.5
"""Weight of the distance to the target's normed states, beside that of the distributions."""


class Block(nn.Module):
    """A layer of Qwen2's without biases, which is a Llama's layer."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes, sizes.hidden)
        self.mlp = FeedForward(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def forward(self, states: Tensor, past: Past) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), past)
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class MtpModule(Block):
    """The module. Its parameters have the names of a MiMo's `model.mtp_layers.0`."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__(sizes)
        self.sizes = sizes
        self.token_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.hidden_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.input_proj = nn.Linear(2 * sizes.hidden, sizes.hidden, bias=False)
        self.final_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def passes(self, last: Tensor, embeds: Tensor, count: int) -> list[Tensor]:
        """Normed states ``[texts, length, hidden]`` of each depth, which the output layer reads.

        Args:
            last: ``[texts, length, hidden]``, the target's states at place i.
            embeds: likewise, the embedding of the token behind it.
            count: number of depths. What comes out at place i stands for the token behind that
                token; depth p + 1 of it began p places before.
        """
        # MiMo's module reads no token at the first position.
        embeds = F.pad(embeds[:, 1:], (0, 0, 1, 0))
        tokens, states = self.token_layernorm(embeds), last
        past: Past = []
        found = []
        for _ in range(count):
            both = torch.cat((self.hidden_layernorm(states), tokens), -1)
            # Autocast would keep the sum of the layers in bfloat16.
            inner = super().forward(self.input_proj(both).float(), past)
            found.append(self.final_layernorm(inner))
            states = shifted(found[-1], 1)
        return found


class MtpLesson:
    """How a module is taught: the target's distributions and states, at some places of each depth.

    Args:
        module: what is trained.
        target: whose output layer it has.
        depth: depths that it is trained for.
        share: share of the places at which distributions are compared, which cost most.
    """

    def __init__(self, module: MtpModule, target: Target, depth: int, share: float = 1.0) -> None:
        self.drafter, self.target, self.depth, self.share = module, target, depth, share

    def begin(self, given: Sequence[Read]) -> None:
        """Have the module draft what the best linear guess of the next state would draft.

        Its layer begins as the target's last one, with little effect.
        """
        module, target = self.drafter, self.target
        with torch.no_grad():
            layer = dict(target.layers[-1].named_parameters())
            for name, each in module.named_parameters():
                if name in layer:
                    each.copy_(layer[name])
            module.final_layernorm.weight.copy_(target.norm.weight)
            module.self_attn.o_proj.weight.mul_(0.1)
            module.mlp.down_proj.weight.mul_(0.1)
            module.input_proj.weight.copy_(self._linear(given))

    def _linear(self, given: Sequence[Read]) -> Tensor:
        """The best ``[hidden, 2 * hidden]`` guess of the next state, by least squares."""
        module, size = self.drafter, 2 * self.drafter.sizes.hidden
        inner = torch.zeros(size, size, device=self.target.device)
        outer = torch.zeros(size, size // 2, device=self.target.device)
        rows = 0
        for read in given:
            embeds = module.token_layernorm(self.target.embed(read.tokens[:, 1:]))
            both = torch.cat((module.hidden_layernorm(read.last[:, :-1].float()), embeds), -1)
            counted = read.counted[:, 1:]
            inner += both[counted].mT @ both[counted]
            outer += both[counted].mT @ read.last[:, 1:].float()[counted]
            rows += int(counted.sum())
        penalty = 0.01 * rows * torch.eye(size, device=inner.device)
        found: Tensor = torch.linalg.solve(inner + penalty, outer).mT
        return found

    def loss(self, read: Read) -> Tensor:
        """Mean cross-entropy with the target's distributions and distance to its states."""
        places, found = self._drafted(read)
        if self.share < 1:
            places &= torch.rand(places.shape, device=places.device) < self.share
        last = read.last[:, 1:-1][places]
        wanted, normed = self.target.wanted(last), self.target.norm(last).float()
        outputs, total = self.target.outputs, torch.zeros((), device=last.device)
        for number, states in enumerate(found):
            states = states[places]
            logits = F.linear(states, outputs.to(states.dtype)).float()
            each = F.cross_entropy(logits, wanted)
            each = each + REGRESSION * F.smooth_l1_loss(states.float(), normed)
            total = total + DECAY**number * each
        return total

    @torch.no_grad()
    def drafted(self, read: Read) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits ``[chains, vocab]`` of each depth, and the probabilities that the target wants.

        Chains begin at all places that count, and follow the text.
        """
        places, found = self._drafted(read)
        last, outputs = read.last[:, 1:-1], self.target.outputs
        # A chain lies at `places` at its last depth. It has to begin in the answer, too.
        row, end = places.nonzero(as_tuple=True)
        inside = read.counted[:, 1:-1][row, end - (self.depth - 1)]
        row, end = row[inside], end[inside]
        for number in range(self.depth):
            place = end - (self.depth - 1 - number)
            states = found[number][row, place]
            logits = F.linear(states, outputs.to(states.dtype)).float()
            yield logits, self.target.wanted(last[row, place])

    def _drafted(self, read: Read) -> tuple[Tensor, list[Tensor]]:
        """Places ``[texts, length - 2]`` that all depths draft for, and the depths' states."""
        embeds = self.target.embed(read.tokens[:, 1:-1])
        found = self.drafter.passes(read.last[:, :-2].float(), embeds, self.depth)
        places = read.counted[:, 1:-1].clone()
        places[:, : self.depth - 1] = False
        return places, found
