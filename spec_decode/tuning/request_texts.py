"""What the trees of a batch's requests have told, by kinds of requests.

A request has a kind, by how much was accepted of its latest trees. What is accepted of a next tree
is learned for each kind from all of its requests: the chance that a path ends at each depth, as in
a table of mortality. So a kind's trees yield what such trees have yielded, whatever made the kind:
a text that is copied, an easy one, or luck.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_graft.spec_decode.trees.shape import MAX_NODES
from vllm_graft.spec_decode.tuning.acceptance import WIDTH_GAIN

LATEST = 0.3
"""What a request's latest tree counts for in its kind. Raised, requests that begin or end to copy
are noticed sooner, and luck makes more kinds."""

KINDS = 12
"""Kinds, for each half of a doubling of what is accepted."""

MEMORY = 4000.0
"""Trees after which what was seen counts for 1/e. Raised, texts that change are noticed later."""

FIRST, LIKELY = 20.0, 6.0
"""Trees of a kind that the batch's text counts for, and trees that the depth before counts for
where few came to a depth. Raised, kinds differ later."""

TOLD = 8
"""Steps that are learned from at once, which takes less of the host's time."""

REFRESH = 400
"""Steps after which what trees yield is computed anew at the latest, likewise."""

Array = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]

_BREAKS = (1, 2, 3, 4, 6, 8, 12, 20, 32, MAX_NODES)
"""Depths up to which ends of paths are counted together, and numbers of nodes for which yields are
computed: others lie on lines between."""

_BUCKET = np.searchsorted(_BREAKS, np.arange(1, MAX_NODES + 1))
_WITHIN = np.stack(
    [np.bincount(_BUCKET[:depth], minlength=len(_BREAKS)) for depth in range(MAX_NODES + 1)]
).astype(np.float64)
"""How many of the first depths lie in each bucket, float64 ``[MAX_NODES + 1, buckets]``."""

_TREES = [(nodes, depth) for nodes in _BREAKS for depth in _BREAKS if depth <= nodes]
_FIRSTS = [_TREES.index((nodes, 1)) for nodes in _BREAKS]


class RequestTexts:
    """The kinds of the requests in flight, and what their trees yield.

    Attributes:
        latest: the requests that decoded last.
    """

    def __init__(self) -> None:
        self.latest: Sequence[str] = ()
        self._means: dict[str, float] = {}
        self._usual = 1.0
        # Ends of paths, and depths that were tried, ``[KINDS, buckets]``; paths that came to the
        # draft's last level with nodes left, and those of them that went on, ``[KINDS]``.
        self._ends, self._tried = np.zeros((2, KINDS, len(_BREAKS)))
        self._whole, self._went_on = np.zeros((2, KINDS))
        self._told: list[tuple[Sequence[str], Sequence[int], Sequence[int], int]] = []
        self._steps = 0
        self._kept: dict[int, tuple[int, Array]] = {}

    def observe(
        self, names: Sequence[str], widths: Sequence[int], emitted: Sequence[int], levels: int
    ) -> None:
        """Learn from the trees of one step, whose draft has so many levels.

        Args:
            widths: nodes of each tree, 1 at least.
            emitted: tokens of each, its bonus token included.
        """
        self.latest = names
        self._told.append((names, widths, emitted, levels))
        self._steps += 1
        if len(self._told) >= TOLD:
            self._learn()

    def _learn(self) -> None:
        """Learn from the steps of which nothing was learned yet."""
        told, self._told = self._told, []
        if not told:
            return
        here = dict.fromkeys(name for names, *_ in told for name in names)
        places = {name: place for place, name in enumerate(here)}
        means = np.array([self._means.get(name, self._usual) for name in places])
        columns: list[Numbers] = []
        for names, widths, emitted, levels in told:
            mine = [places[name] for name in names]
            width, accepted = np.array(widths), np.array(emitted) - 1
            depth, before = np.minimum(levels, width), means[mine]
            columns.append(np.stack([_kinds(before), width, accepted, depth]))
            # Of a chain whose nodes were all accepted more might have been.
            seen = np.log2(1.0 + np.where(accepted < width, accepted, 2 * accepted))
            means[mine] = before + LATEST * (seen - before)
        self._means = dict(zip(places, means.tolist()))
        self._usual = float(means.mean())
        self._count(*np.concatenate(columns, axis=1))

    def _count(self, kinds: Numbers, width: Numbers, accepted: Numbers, depth: Numbers) -> None:
        """Count ends of paths; `depth` is that of a tree's levels."""
        # A path that came to the last level might have gone deeper, too.
        went_on = accepted > depth
        ended = (accepted < depth) | (went_on & (accepted < width))
        tried = np.minimum(accepted + ended, MAX_NODES)
        rarer = (width / depth) ** -WIDTH_GAIN - 1
        levels = _WITHIN[tried] + rarer[:, None] * _WITHIN[np.minimum(tried, depth)]
        fading = math.exp(-len(kinds) / MEMORY)
        for each in (self._ends, self._tried, self._whole, self._went_on):
            each *= fading
        np.add.at(self._tried, kinds, levels)
        np.add.at(self._ends, (kinds[ended], _BUCKET[accepted[ended]]), 1.0)
        whole = (accepted >= depth) & (width > depth)
        self._whole += np.bincount(kinds[whole], minlength=KINDS)
        self._went_on += np.bincount(kinds[went_on], minlength=KINDS)

    def kinds(self, names: Iterable[str]) -> Numbers:
        """The kind of each request; of one that is not known, the mean one."""
        self._learn()
        return _kinds(np.array([self._means.get(name, self._usual) for name in names]))

    def yields(self, levels: int, miss: float) -> Array:
        """Accepted drafts, float64 ``[KINDS, MAX_NODES + 1]``, of no node, the first one, and more
        of them of a tree with so many levels. `miss` is the chance that a chain of the batch's text
        misses a level."""
        due, found = self._kept.get(levels, (0, None))
        if found is None or self._steps >= due:
            found = self._yields(levels, miss)
            self._kept[levels] = self._steps + min(self._steps // 4 + TOLD, REFRESH), found
        return found

    def _yields(self, levels: int, miss: float) -> Array:
        chance = np.empty_like(self._ends)
        before, weight = np.full(KINDS, miss), FIRST
        for bucket in range(len(_BREAKS)):
            ends, tried = self._ends[:, bucket], self._tried[:, bucket]
            before = chance[:, bucket] = (ends + weight * before) / (tried + weight)
            weight = LIKELY
        inside, rarer, counts = _shapes(levels)
        goes_on = np.ones_like(chance)
        if inside < len(_BREAKS):
            goes_on[:, inside] = (self._went_on + 1.0) / (self._whole + 2.0)
        # Paths that come through each bucket, and levels that they follow within it.
        hit = np.clip(1 - chance * rarer, 1e-6, 1 - 1e-6)
        through = hit**counts
        come = goes_on * np.cumprod(through * goes_on, axis=2) / (through * goes_on)
        accepted = (come * hit * (1 - through) / (1 - hit)).sum(axis=2)
        best = np.maximum.reduceat(accepted, _FIRSTS, axis=0).T
        nodes = np.arange(MAX_NODES + 1)
        return np.stack([np.interp(nodes, (0, *_BREAKS), (0.0, *each)) for each in best])


def _kinds(means: Array) -> Numbers:
    return np.minimum(2 * means, KINDS - 1).astype(np.int64)


@functools.cache
def _shapes(levels: int) -> tuple[int, Array, Array]:
    """Buckets within the levels of a draft; by how much misses are rarer in each bucket of each of
    `_TREES` than in a chain, and its depths there, ``[trees, 1, buckets]``."""
    inside = int(np.searchsorted(_BREAKS, levels)) + 1
    gains = np.array([(nodes / depth) ** -WIDTH_GAIN for nodes, depth in _TREES])
    rarer = np.where(np.arange(len(_BREAKS)) < inside, gains[:, None], 1.0)
    counts = _WITHIN[[depth for _, depth in _TREES]]
    return inside, rarer[:, None], counts[:, None]
