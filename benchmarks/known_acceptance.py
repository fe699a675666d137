"""Weights of a target that follows a table, and of an MTP module that knows it as well as is asked.

Each token has one successor. Half of a token's embedding is a direction of its own, and the output
head finds its successor by it. The other half is what the MTP module makes its guess of: it mixes
the directions of a few tokens, whose successors are its first guess, its second one, and so on. The
true successor is guess ``i`` with the chance that is asked for, and the module's probabilities of
its guesses are in proportion to these chances, as those of a calibrated head would be. They sum up
to 1, though: the module does not know how often it has no right guess. Whether a guess is right
depends on the token alone, not on the position, nor on the guess before.

All layers are computed, but what they add to the residual stream is so small that no token changes.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def successors(vocabulary: int, seed: int) -> torch.Tensor:
    """A table i64 ``[vocabulary]``: all tokens from the third one on follow each other in a ring.

    The first two begin and end texts: they have successors, and are none.
    """
    generator = torch.Generator().manual_seed(seed)
    ring = torch.randperm(vocabulary - _FIRST, generator=generator) + _FIRST
    table = torch.empty(vocabulary, dtype=torch.int64)
    table[ring] = ring.roll(-1)
    table[:_FIRST] = ring[:_FIRST]
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
    weights: dict[str, torch.Tensor], chances: Sequence[float], seed: int = 0
) -> torch.Tensor:
    """Change the weights of a Qwen3-Next with an MTP module in place.

    Args:
        weights: by their names in the checkpoint. The module has the target's embeddings and head.
        chances: how often the module's first guess is right, its second one, and so on.
        seed: of the table and the guesses.

    Returns:
        The table, i64 ``[vocabulary]``.
    """
    embedding = weights["model.embed_tokens.weight"]
    vocabulary, hidden = embedding.shape
    half = hidden // 2
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(vocabulary, half, generator=generator)
    directions *= half**0.5 / directions.norm(dim=1, keepdim=True)
    table = successors(vocabulary, seed)
    chosen = guesses(vocabulary, chances, seed + 1)
    own = mixtures(directions, chosen, chances)
    # A module's hidden state has its whole length in one half, a target's in both.
    head = torch.zeros(vocabulary, hidden)
    head[table[_FIRST:], :half] = directions[_FIRST:] * (_SHARPNESS / (2 * half) ** 0.5)
    read = torch.zeros(hidden, 2 * hidden)
    read[:half, half:hidden] = torch.eye(half)
    changed = {
        "model.embed_tokens.weight": torch.cat([directions, own], 1),
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
