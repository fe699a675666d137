"""A DSpark head for a Llama: a block of positions in one pass, and a bias by the token before.

The target's states of the text become K and V of the head's layers. Queries are the last token and
masks behind it, which all see each other: the query at place i drafts the token behind i. The
logits of a position get a bias of low rank, which the token before decides. vLLM's
`Qwen3DSparkForCausalLM` loads it, with the target's embedding and output layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lab_heads.target_states import Read, Target
from benchmarks.real_pair.head import FeedForward, HeadSizes

DECAY = 0.85
"""Weight of a position's loss over that of the position before."""

MASK = 0
"""Token that stands for the masks: `<s>`, which texts of the lab's pair do not have."""


def rotated(states: Tensor, places: Tensor, theta: float) -> Tensor:
    """Rotate ``[texts, heads, length, head]`` by int ``[texts, length]`` places (RoPE)."""
    half = states.shape[-1] // 2
    steps = theta ** (-torch.arange(half, device=states.device) / half)
    angles = places[:, None, :, None] * steps
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    left, right = states.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


class BlockAttention(nn.Module):
    """Attention of Qwen3's form, to a context and to the queries of the same block."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, kv = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
        self.q_proj = nn.Linear(sizes.hidden, width, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, kv, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, kv, bias=False)
        self.o_proj = nn.Linear(width, sizes.hidden, bias=False)
        self.q_norm = nn.RMSNorm(sizes.head, sizes.eps)
        self.k_norm = nn.RMSNorm(sizes.head, sizes.eps)

    def keys(self, inputs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """K and V ``[texts, kv_heads, length, head]`` of inputs ``[texts, length, hidden]``."""
        k, v = (
            proj(inputs).unflatten(-1, (-1, self.sizes.head)).transpose(1, 2)
            for proj in (self.k_proj, self.v_proj)
        )
        return rotated(self.k_norm(k), places, self.sizes.theta), v

    def forward(
        self, inputs: Tensor, places: Tensor, context: Tensor, before: Tensor, seen: Tensor
    ) -> Tensor:
        """Attend from ``[texts, queries, hidden]``.

        Args:
            inputs: normed states of the queries.
            places: int ``[texts, queries]``.
            context: ``[texts, length, hidden]``, what stands for the text.
            before: int ``[texts, length]``, its places.
            seen: bool ``[texts, queries, length + queries]``.
        """
        q = self.q_proj(inputs).unflatten(-1, (-1, self.sizes.head)).transpose(1, 2)
        q = rotated(self.q_norm(q), places, self.sizes.theta)
        k, v = (
            torch.cat(each, 2).repeat_interleave(self.sizes.heads // self.sizes.kv_heads, 1)
            for each in zip(self.keys(context, before), self.keys(inputs, places), strict=True)
        )
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, seen[:, None])
        attended: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return attended


class BlockLayer(nn.Module):
    """A layer over the queries of blocks."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__()
        self.self_attn = BlockAttention(sizes)
        self.mlp = FeedForward(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, sizes.eps)

    def forward(self, states: Tensor, *seen: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states), *seen)
        found: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return found


class MarkovHead(nn.Module):
    """A bias of rank `rank` on the logits of a token, by the token before it."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)

    def forward(self, before: Tensor) -> Tensor:
        found: Tensor = self.markov_w2(self.markov_w1(before))
        return found


class DSparkHead(nn.Module):
    """The head. Its parameters have the names that vLLM's `Qwen3DSparkForCausalLM` loads.

    Args:
        sizes: sizes of the target, and which of its layers' inputs the head reads.
        depth: positions of a block, all of which draft.
        layers: layers of the head.
        rank: rank of the bias.
    """

    def __init__(self, sizes: HeadSizes, depth: int, layers: int, rank: int) -> None:
        super().__init__()
        self.sizes, self.depth = sizes, depth
        self.fc = nn.Linear(len(sizes.aux) * sizes.hidden, sizes.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.layers = nn.ModuleList(BlockLayer(sizes) for _ in range(layers))
        self.norm = nn.RMSNorm(sizes.hidden, sizes.eps)
        self.markov_head = MarkovHead(sizes.vocab, rank)

    def forward(self, inner: Tensor, embeds: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
        """Normed states ``[texts, blocks, depth, hidden]``, which the output layer reads.

        Args:
            inner: ``[texts, length, layers * hidden]``, states of the target, those of `Read`.
            embeds: ``[texts, blocks, hidden]``, embeddings of the tokens at the anchors.
            mask: ``[hidden]``, the embedding of a mask.
            anchors: int64 ``[texts, blocks]``, places at which blocks begin. A block sees the
                target's states of the places before.
        """
        length, depth = inner.shape[1], self.depth
        # Autocast would keep the sum of the layers in bfloat16.
        context = self.hidden_norm(self.fc(inner).float())
        states = mask.expand(*embeds.shape[:2], depth, -1).clone()
        states[:, :, 0] = embeds
        states = states.flatten(1, 2)
        offsets = torch.arange(depth, device=anchors.device)
        places = (anchors[..., None] + offsets).flatten(1)
        before = torch.arange(length, device=anchors.device).expand(len(inner), -1)
        blocks = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(depth)
        starts = anchors.repeat_interleave(depth, 1)
        own = (blocks[:, None] == blocks).expand(len(inner), -1, -1)
        seen = torch.cat((before[:, None] < starts[..., None], own), -1)
        for layer in self.layers:
            states = layer(states, places, context, before, seen)
        found: Tensor = self.norm(states).unflatten(1, (-1, depth))
        return found


class DSparkLesson:
    """How a head is taught: the target's distributions behind random places of the texts.

    Args:
        head: what is trained.
        target: whose embedding and output layer it has.
        blocks: blocks that begin in a text.
    """

    def __init__(self, head: DSparkHead, target: Target, blocks: int) -> None:
        self.drafter, self.target, self.blocks = head, target, blocks
        self.mask = target.embed(torch.tensor(MASK, device=target.device))

    def begin(self, given: Sequence[Read]) -> None:
        """Have the layers begin as the target's last ones, on the states that these would read."""
        head, target = self.drafter, self.target
        hidden, count = head.sizes.hidden, len(head.layers)
        with torch.no_grad():
            for layer, source in zip(head.layers, target.layers[-count:], strict=True):
                known = dict(source.named_parameters())
                for name, each in layer.named_parameters():
                    if name in known:
                        each.copy_(known[name])
            head.norm.weight.copy_(target.norm.weight)
            head.fc.weight.mul_(0.1)
            head.fc.weight[:, -hidden:] += torch.eye(hidden, device=target.device)
            last = head.layers[-1]
            read = given[0]
            context = last.input_layernorm(read.inner[read.counted][:, -hidden:].float())
            head.hidden_norm.weight.copy_(last.input_layernorm.weight)
            for layer in head.layers:
                attn = layer.self_attn
                for norm, proj in ((attn.q_norm, attn.q_proj), (attn.k_norm, attn.k_proj)):
                    size = proj(context).pow(2).mean().sqrt()
                    norm.weight.fill_(size.item())
                layer.self_attn.o_proj.weight.mul_(0.3)
                layer.mlp.down_proj.weight.mul_(0.3)
            # Tokens of like embeddings have like successors.
            rank = head.markov_head.markov_w1.weight.shape[1]
            u, s, _ = torch.linalg.svd(target.embedding.float(), full_matrices=False)
            rows = u[:, :rank] * s[:rank]
            head.markov_head.markov_w1.weight.zero_()
            head.markov_head.markov_w1.weight[:, : rows.shape[1]] = rows / rows.pow(2).mean().sqrt()
            head.markov_head.markov_w2.weight.zero_()

    def loss(self, read: Read) -> Tensor:
        """Mean cross-entropy with the target's distributions, of the positions with weights."""
        total = torch.zeros((), device=read.last.device)
        for number, (logits, wanted) in enumerate(self._positions(read, self.blocks)):
            total = total + DECAY**number * F.cross_entropy(logits, wanted)
        return total

    @torch.no_grad()
    def drafted(self, read: Read) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits ``[chains, vocab]`` of each depth, and the probabilities that the target wants.

        Chains begin at places that count, and follow the text.
        """
        yield from self._positions(read, self.blocks)

    def _positions(self, read: Read, blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
        head, target = self.drafter, self.target
        anchors, real = self._anchors(read, blocks)
        row = torch.arange(len(anchors), device=anchors.device)[:, None]
        embeds = target.embed(read.tokens[row, anchors])
        found = head(read.inner.float(), embeds, self.mask, anchors)
        row = row.expand_as(anchors)[real]
        for number in range(head.depth):
            states, places = found[:, :, number][real], anchors[real] + number
            logits = F.linear(states, target.outputs.to(states.dtype)).float()
            logits = logits + head.markov_head(read.tokens[row, places]).float()
            yield logits, target.wanted(read.last[row, places])

    def _anchors(self, read: Read, blocks: int) -> tuple[Tensor, Tensor]:
        """Places ``[texts, blocks]`` where blocks may begin, and which of them are real."""
        fits = read.counted.clone()
        # The context is not empty, and the target has said something about all positions.
        fits[:, 0] = False
        for _ in range(self.drafter.depth - 1):
            fits[:, :-1] &= fits[:, 1:].clone()
            fits[:, -1] = False
        keys = torch.rand(fits.shape, device=fits.device).masked_fill(~fits, -1.0)
        best = keys.topk(min(blocks, fits.shape[1]), 1)
        return best.indices, best.values >= 0
