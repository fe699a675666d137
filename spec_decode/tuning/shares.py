"""Shares of a step's rows: each request has as many nodes as are likely enough to be accepted.

The nodes of all requests are put into one order, by how much each probably adds to its request's
speed, and the first ones are verified: as many as are worth the time. The host decides, by what the
trees of each request have told before. So nobody waits for the device, and to vLLM's scheduler a
share is a list of drafts that is short. The first nodes of a tree are the best tree of so many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from vllm_graft.spec_decode.tuning.request_texts import Array, Numbers, RequestTexts
from vllm_graft.spec_decode.tuning.step_times import Costs, between

GAIN = 0.03
"""Part by which shares must make requests faster than one number of nodes, before they are used.
Raised, what requests seem to differ by chance costs less, and less is won."""

POWER = 0.1
"""The power of a request's tokens per second that counts. With 1 all tokens would count the same:
requests that copy would take nodes from others as long as the sum grows. Near 0 no request becomes
slower by a larger part than another one becomes faster."""

_TIMED = 32
"""Latest steps of shares of which it is known by how much they took longer than expected."""


class Share(NamedTuple):
    """The nodes that each request gets of a tree of `nodes`; those that are not named have `other`.

    `seconds` is what the step takes by what was measured, and `worth` the sum of what its tokens
    are worth to each request (see `POWER`).
    """

    nodes: int
    widths: Mapping[str, int]
    other: int
    seconds: float
    worth: float

    def of(self, names: Sequence[str], max_rows: int) -> list[int]:
        """The nodes of each of these requests, fewer of the wide trees if more requests have come
        than the share was made for: roots and nodes are `max_rows` at most, if roots alone are."""
        widths = [self.widths.get(name, self.other) for name in names]
        if sum(widths) + len(widths) > max_rows:
            most = max(max_rows // len(widths) - 1, 0)
            widths = [min(width, most) for width in widths]
        return widths


@dataclass
class Shares:
    """Chooses shares.

    Attributes:
        rows: seconds of the passes whose rows the requests share, by their number, ascending: the
            sizes of CUDA graphs.
        levels: seconds of a draft's levels, by number of nodes, then of requests.
        depths: levels of the trees of each number of nodes.
    """

    rows: Mapping[int, float]
    levels: Costs
    depths: Mapping[int, int]
    texts: RequestTexts = field(default_factory=RequestTexts)
    _beyond: dict[int, deque[float]] = field(default_factory=dict)
    _latest: int = 0
    _turn: int = 0

    def alike(self, times: Mapping[int, float], miss: float) -> float:
        """The worth per second of the best number of nodes that all requests have. `times` are the
        seconds of each; `miss` is as for `best`."""
        kinds = self.texts.kinds(self.texts.latest)
        rates = []
        for nodes, seconds in times.items():
            accepted = self.texts.yields(self.depths.get(nodes, 1), miss)[kinds, nodes]
            rates.append(float(((1 + accepted) ** POWER).sum() / seconds**POWER))
        return max(rates)

    def best(self, size: int, allowed: Sequence[int], miss: float, more: float) -> Share | None:
        """The share that is worth most per second; None if requests are alike, or costs unknown.

        Args:
            size: number of requests that costs are looked up for.
            allowed: numbers of nodes that may be drafted for each.
            miss: chance that a chain misses a level of the batch's text.
            more: seconds that steps take besides those that were measured.
        """
        names = self.texts.latest
        *kinds, new = self.texts.kinds([*names, ""]).tolist()
        rows, places, counts = np.unique(kinds, return_inverse=True, return_counts=True)
        if len(rows) < 2:
            return None
        beyond, found = self.beyond(size), []
        drafting = {nodes: between(self.levels.get(nodes), size) for nodes in allowed}
        for nodes in self._in_turn([each for each in allowed if drafting[each] is not None]):
            accepted = self.texts.yields(self.depths[nodes], miss)[rows, : nodes + 1]
            found.append(self._of(accepted, counts, (drafting[nodes] or 0.0) + more, beyond))
        if not found:
            return None
        _, share, widths = max(found, key=itemgetter(0))
        self._latest = share.nodes
        given = dict(zip(names, widths[places].tolist()))
        other = int(widths[np.abs(rows - new).argmin()])
        return share._replace(widths=given, other=other)

    def _in_turn(self, allowed: Sequence[int]) -> set[int]:
        """The number that was the best before, and another one: to look at all takes too long."""
        self._turn += 1
        other = allowed[self._turn % len(allowed)] if allowed else 0
        return {self._latest, other} & {*allowed}

    def _of(
        self, accepted: Array, counts: Numbers, more: float, beyond: float
    ) -> tuple[float, Share, Numbers]:
        """The worth per second of the best share, the share, and the nodes of each kind of request.

        Args:
            accepted: drafts of each kind that are accepted of no node, the first one, and more.
            counts: requests of each kind.
        """
        worths = (1 + accepted) ** POWER
        gains = np.diff(worths, axis=1)
        nodes = gains.shape[1]
        # No node comes before its parent, and each request goes on to be learned from.
        order = np.minimum.accumulate(gains, axis=1)
        order[:, 0] = np.inf
        ranked = np.argsort(-order, axis=None, kind="stable")
        spent = np.cumsum(counts[ranked // nodes])
        gained = np.cumsum(gains.ravel()[ranked] * counts[ranked // nodes])
        batch = int(counts.sum())  # Each root is worth 1.
        kept = np.searchsorted(spent, np.fromiter(self.rows, np.int64) - batch, side="right")
        worth = batch + np.where(kept < len(counts), -np.inf, gained[kept - 1])
        seconds = np.fromiter(self.rows.values(), np.float64) + more
        rates = worth / (seconds + beyond) ** POWER
        best = int(rates.argmax())
        share = Share(nodes, {}, 0, float(seconds[best]), float(worth[best]))
        widths = np.bincount(ranked[: kept[best]] // nodes, minlength=len(counts))
        return float(rates[best]), share, widths

    def took(self, size: int, share: Share, seconds: float) -> None:
        """Learn from the time of a step of a share."""
        self._beyond.setdefault(size, deque(maxlen=_TIMED)).append(seconds - share.seconds)

    def beyond(self, size: int) -> float:
        """Seconds that steps of shares take longer than expected; disturbances only lengthen."""
        beyond = sorted(self._beyond.get(size, ()))
        return beyond[len(beyond) // 4] if len(beyond) >= _TIMED // 8 else 0.0
