"""What a target says of texts: states of its layers, which drafters read and are taught with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.real_pair.texts import Text


@dataclass(frozen=True)
class Read:
    """Texts side by side, padded at their ends, and the target's states at their tokens.

    Attributes:
        tokens: int64 ``[texts, length]``.
        counted: bool ``[texts, length]``; whether what follows a place is part of an answer.
        inner: ``[texts, length, layers * hidden]``, inputs of the layers that a drafter reads.
        last: ``[texts, length, hidden]``, what the last layer leaves, before the last norm.
    """

    tokens: Tensor
    counted: Tensor
    inner: Tensor
    last: Tensor


class Target:
    """A Llama that does not change.

    Args:
        model: of transformers, a causal language model.
        aux: layers whose inputs drafters read; none for those that read the last states.
    """

    def __init__(self, model: Any, aux: Sequence[int] = ()) -> None:
        self.model = model.eval().requires_grad_(False)
        self.aux = tuple(aux)
        self.device = next(model.parameters()).device
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.outputs: Tensor = model.get_output_embeddings().weight
        self.norm: Any = model.base_model.norm
        self.layers: Any = model.base_model.layers

    @torch.no_grad()
    def read(self, tokens: Tensor, counted: Tensor) -> Read:
        """Run the target over ``[texts, length]`` tokens."""
        tokens = tokens.to(self.device)
        found: list[Tensor] = []
        modules = [*(self.layers[layer] for layer in self.aux), self.norm]
        hooks = [
            module.register_forward_pre_hook(lambda _, given: found.append(given[0]))
            for module in modules
        ]
        try:
            self.model.base_model(tokens, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        # The hooks run in the layers' order, and the last is the norm's.
        *inner, last = found
        joined = torch.cat(inner, -1) if inner else last[..., :0]
        return Read(tokens, counted.to(self.device), joined, last)

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, ``[..., hidden]``, in float32."""
        return F.embedding(tokens, self.embedding).float()

    @torch.no_grad()
    def wanted(self, last: Tensor) -> Tensor:
        """Probabilities ``[rows, vocab]`` of what follows states ``[rows, hidden]``, not normed."""
        states = self.norm(last.to(self.outputs.dtype))
        return F.linear(states, self.outputs).float().softmax(-1)


def side_by_side(texts: Sequence[Text], longest: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[texts, length]`` and the places that count, of texts cut to `longest` tokens."""
    width = min(longest, max(len(text.tokens) for text in texts))
    tokens = torch.zeros(len(texts), width, dtype=torch.int64)
    counted = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        length = min(width, len(text.tokens))
        tokens[row, :length] = text.tokens[:length]
        counted[row, max(0, text.prompt - 1) : length] = True
    return tokens, counted


def groups(
    texts: Sequence[Text], tokens: int, longest: int, order: torch.Generator
) -> Iterator[list[Text]]:
    """Texts in random order, in groups of up to `tokens` tokens with padding, of like lengths."""
    places = torch.randperm(len(texts), generator=order).tolist()
    part = max(1, 32 * tokens // longest)
    found: list[list[Text]] = []
    for start in range(0, len(places), part):
        shuffled = [texts[place] for place in places[start : start + part]]
        group: list[Text] = []
        for text in sorted(shuffled, key=lambda text: len(text.tokens)):
            if group and (len(group) + 1) * min(longest, len(text.tokens)) > tokens:
                found.append(group)
                group = []
            group.append(text)
        found.append(group)
    for place in torch.randperm(len(found), generator=order).tolist():
        yield found[place]


def reads(
    target: Target, texts: Sequence[Text], tokens: int, longest: int, kept: int, seed: int
) -> Iterator[Read]:
    """Reads without an end. The first `kept` are kept, and come again instead of new ones.

    On a CPU the target takes most of a step, so that it pays to keep what it said; on a GPU 0 is
    right.
    """
    order = torch.Generator().manual_seed(seed)
    stored: list[Read] = []
    while True:
        for group in groups(texts, tokens, longest, order):
            read = target.read(*side_by_side(group, longest))
            if kept:
                stored.append(read)
            yield read
            while kept and len(stored) >= kept:
                for place in torch.randperm(len(stored), generator=order).tolist():
                    yield stored[place]
