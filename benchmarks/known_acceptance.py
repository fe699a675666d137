"""Weights of a target that follows a table, and of an MTP module that knows it as well as is asked.

Each token has one successor. Half of a token's embedding is a direction of its own, and the output
head finds its successor by it. The other half is what the MTP module makes its guess of: it mixes
the directions of a few tokens, whose successors are its first guess, its second one, and so on. The
true successor is guess ``i`` with the chance that is asked for, and the module's probabilities of
its guesses are in proportion to these chances, as those of a calibrated head would be. They sum up
to 1, though: the module does not know how often it has no right guess. Whether a guess is right
depends on the token alone, not on the position, nor on the guess before.

The text is a ring of all tokens. With `HotText` it is a shorter ring, of which a known share is
among the first tokens of the vocabulary. A token outside the ring looks like one inside, so that
both are followed by the same token. All guesses are then tokens of the ring.

All layers are computed, but what they add to the residual stream is so small that no token changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Ends of the names of weights that write to the residual stream."""

_ADDED = 0.02
"""Their scale: so much of a hidden state's length is added by a layer, or less."""

_SHARPNESS = 1.2
"""Standard deviation of the module's logits of tokens that are no guess. A guess lies about ten of
them higher, so that a vocabulary of 150,000 such tokens holds about 1 % of the probability."""

_CHUNK = 8192
_FIRST = 2
"""Tokens before it, which begin and end a text, succeed no token."""

APART = 192
"""Distance on the ring between the successors of two neighbours outside it, in tokens."""


@dataclass(frozen=True)
class HotText:
    """A text of which a known share is among the first tokens of the vocabulary.

    The text is a ring of ``tokens - apart`` tokens. A list of the most frequent tokens that begins
    with the first `tokens` ids, in their order, holds exactly `share` of what it has not seen: each
    token that it learns takes the place of one that is not in the text.

    Attributes:
        tokens: ids below it are hot.
        share: fraction of the text's tokens that are hot.
        apart: ids below it are not in the text: those that prompts consist of.
    """

    tokens: int
    share: float
    apart: int = _FIRST

    def ring(self, vocabulary: int, generator: torch.Generator) -> torch.Tensor:
        """The tokens of the text, i64 ``[tokens - apart]``, in their order, which is random.

        Raises:
            ValueError: if the vocabulary does not have such tokens, or there is no such share.
        """
        if not 0 <= self.share <= 1:
            raise ValueError(f"a share of hot tokens is from 0 to 1; got {self.share}")
        length = self.tokens - self.apart
        hot = round(length * self.share)
        if self.apart < _FIRST or length < _FIRST or self.tokens + length - hot > vocabulary:
            raise ValueError(
                f"{self.tokens} hot tokens of {vocabulary}, of which prompts use {self.apart}, "
                f"leave no text whose share of hot tokens is {self.share}: take a number between"
            )
        others = torch.randperm(vocabulary - self.tokens, generator=generator)[: length - hot]
        text = torch.cat((torch.arange(hot) + self.apart, others + self.tokens))
        return text[torch.randperm(length, generator=generator)]


def successors(vocabulary: int, seed: int, hot: HotText | None = None) -> torch.Tensor:
    """A table i64 ``[vocabulary]``: all tokens from the third one on follow each other in a ring.

    The first two begin and end texts: they have successors, and are none. With `hot` the ring is
    shorter. Tokens outside it lead to places of the ring that are `APART` from each other, in the
    order of their ids.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.empty(vocabulary, dtype=torch.int64)
    if hot is None:
        ring = torch.randperm(vocabulary - _FIRST, generator=generator) + _FIRST
        table[:_FIRST] = ring[:_FIRST]
    else:
        ring = hot.ring(vocabulary, generator)
        outside = torch.ones(vocabulary, dtype=torch.bool).index_fill_(0, ring, False)
        table[outside] = ring[torch.arange(vocabulary - len(ring)) * APART % len(ring)]
    table[ring] = ring.roll(-1)
    return table


def guesses(vocabulary: int, chances: Sequence[float], seed: int) -> torch.Tensor:
    """Tokens whose successors a module guesses, best first: i64 ``[vocabulary, len(chances)]``.

    Row ``t`` has `t` itself in column ``i`` with the chance ``chances[i]``; all others are random.

    Raises:
        ValueError: if chances are not falling, or their sum is above 1.
    """
    given = torch.tensor(chances, dtype=torch.float64)
    if (
        given.min() <= 0
        or given.sum() > 1
        or not torch.equal(given, given.sort(descending=True)[0])
    ):
        raise ValueError(
            f"chances of guesses must be positive and fall, with a sum of at most 1; "
            f"got {list(chances)}"
        )
    generator = torch.Generator().manual_seed(seed)
    token = torch.arange(vocabulary)[:, None]
    # Another token, and other ones in each column: steps are below the vocabulary's share of each.
    share = (vocabulary - 1) // len(chances)
    steps = torch.randint(share, (vocabulary, len(chances)), generator=generator)
    found = (token + 1 + steps + share * torch.arange(len(chances))) % vocabulary
    drawn = torch.rand(vocabulary, generator=generator, dtype=torch.float64)
    place = torch.searchsorted(given.cumsum(0), drawn, right=True)
    right = place < len(chances)
    found[right, place[right]] = token[right, 0]
    return found


def mixtures(
    directions: torch.Tensor, chosen: torch.Tensor, chances: Sequence[float]
) -> torch.Tensor:
    """What a module reads its guesses of: f32 ``[vocabulary, size]``, of length ``sqrt(size)``.

    Args:
        directions: f32 ``[vocabulary, size]``, rows of length ``sqrt(size)``.
        chosen: as `guesses` makes them.
        chances: probabilities of the guesses. The product of a mixture with a guess's direction is
            the logarithm of its probability, and a constant that makes the mixture so long.
    """
    size = directions.shape[1]
    logs = torch.tensor(chances).log() / (_SHARPNESS * size**0.5)
    parts = []
    for rows in chosen.split(_CHUNK):
        own = directions[rows]
        gram = own @ own.mT / size
        # Weights that give all guesses the product 1, and those that give them the logarithms.
        even = torch.linalg.solve(gram, torch.ones(len(rows), len(logs), 1))
        uneven = torch.linalg.solve(gram, logs[:, None].expand(len(rows), -1, 1))

        # |base * even + uneven| = 1, where lengths are those of the mixtures.
        a = (even.mT @ gram @ even)[:, 0, 0]
        b = (even.mT @ gram @ uneven)[:, 0, 0]
        c = (uneven.mT @ gram @ uneven)[:, 0, 0] - 1
        base = (-b + (b * b - a * c).sqrt()) / a
        weights = base[:, None, None] * even + uneven
        parts.append((weights * own).sum(1))
    return torch.cat(parts)


def follow_a_table(
    weights: dict[str, torch.Tensor],
    chances: Sequence[float],
    seed: int = 0,
    hot: HotText | None = None,
) -> torch.Tensor:
    """Change the weights of a Qwen3-Next with an MTP module in place.

    Args:
        weights: by their names in the checkpoint. The module has the target's embeddings and head.
        chances: how often the module's first guess is right, its second one, and so on.
        seed: of the table and the guesses.
        hot: the text's share of hot tokens; None for a text of all tokens.

    Returns:
        The table, i64 ``[vocabulary]``.
    """
    embedding = weights["model.embed_tokens.weight"]
    vocabulary, hidden = embedding.shape
    half = hidden // 2
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(vocabulary, half, generator=generator)
    directions *= half**0.5 / directions.norm(dim=1, keepdim=True)
    table = successors(vocabulary, seed, hot)
    # A module's hidden state has its whole length in one half, a target's in both.
    scale = _SHARPNESS / (2 * half) ** 0.5
    head = torch.zeros(vocabulary, hidden)
    if hot is None:
        head[table[_FIRST:], :half] = directions[_FIRST:] * scale
        own = mixtures(directions, guesses(vocabulary, chances, seed + 1), chances)
        seen = torch.cat([directions, own], 1)
    else:
        # Tokens outside the text have rows of the head that answer to no token.
        head[_FIRST:, :half] = directions[_FIRST:] * scale
        text = table.unique()
        head[table[text], :half] = directions[text] * scale
        own = mixtures(directions[text], guesses(len(text), chances, seed + 1), chances)
        seen = torch.cat([directions[text], own], 1)[_stand_ins(table, text)]
    read = torch.zeros(hidden, 2 * hidden)
    read[:half, half:hidden] = torch.eye(half)
    changed = {
        "model.embed_tokens.weight": seen,
        "lm_head.weight": head,
        "mtp.fc.weight": read,
    }
    for name, value in changed.items():
        weights[name] = value.to(weights[name].dtype)
    for name, weight in weights.items():
        if name.endswith(_OUTPUTS):
            weight.mul_(_ADDED)
        elif name in ("model.norm.weight", "mtp.norm.weight"):
            # Qwen3-Next adds 1 to the weights of its norms.
            weight.zero_()
    return table


def _stand_ins(table: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Place in `text` of the token that each token looks like: i64, as many as the table has.

    A token of the text looks like itself, another one like that with the same successor.
    """
    place = torch.empty_like(table)
    place[table[text]] = torch.arange(len(text))
    return place[table]
