"""How many nodes pay: learned while serving, from the time of steps and the tokens they yield."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vllm_graft.spec_decode.acceptance import Acceptance

BLOCK = 6
"""Steps for which a choice is kept: the first after a change can't be timed."""

PROBE = 256
"""Steps without drafts after which a block of them is tried again: the text may have changed."""

_TIMES = 16
"""Recent step times of which the median is believed."""

_SHARE = 64.0
"""Steps over which the share of those with prompts, and what prompts add, is averaged."""

Costs = Mapping[int, Mapping[int, float]]
"""Seconds of a step by number of nodes, then by number of requests."""


@dataclass
class _Batches:
    """What is known of the batches of one size.

    Attributes:
        times: recent seconds of steps without prompts, by number of nodes.
        beside: likewise of steps with prompts.
        prompts: share of the steps in which prompts ran, the recent ones above all.
        choice: the number of nodes in use, for `left` more steps.
    """

    times: dict[int, deque[float]] = field(default_factory=dict)
    beside: dict[int, deque[float]] = field(default_factory=dict)
    prompts: float = 0.0
    choice: int | None = None
    left: int = 0

    def median(self, nodes: int) -> float | None:
        """Seconds of a step of so many nodes, None if none was timed."""
        return _median(self.times.get(nodes))


class NodeTuner:
    """Chooses the number of nodes that yields the most tokens a second (discounted UCB).

    Acceptance depends on the text and hardly on the batch, so all batch sizes share it; the time
    of a step depends on both, and is kept by size. Each choice lasts `BLOCK` steps. The score of a
    number of nodes is the upper bound of its acceptance length over the time of a step (Garivier
    and Moulines 2011, arXiv:0805.3415). What prompts add to a step is the same for every number:
    it is averaged over all, and the steps with prompts are compared without it.

    A time that was not seen comes from `seed`, corrected by what the size's other numbers took
    more than their seeds; without a seed the number is tried, unless it could not be the best even
    if it took no longer than at a smaller size.

    Args:
        schedule: nodes by number of requests in the batch, index 0 not used; its distinct values
            are the numbers to choose from.
        max_rows: rows, root and nodes of all requests, that a step may verify; with more
            requests than fit even at the smallest number, this number is chosen.
        sizes: numbers of requests, ascending, whose batches are alike: those up to a size, and
            above the size before. None is powers of two.
    """

    def __init__(
        self, schedule: list[int], max_rows: int, sizes: Sequence[int] | None = None
    ) -> None:
        self._schedule = schedule
        self._max_rows = max_rows
        self._sizes = list(sizes or (1 << power for power in range(len(schedule).bit_length())))
        self._numbers = sorted(set(schedule[1:]))
        self._acceptance = Acceptance(self._numbers)
        self._batches: dict[int, _Batches] = {}
        self._costs: Costs = {}
        self._idle = 0
        self._added = 0.0
        self._timed_prompts = 0.0

    def seed(self, costs: Costs) -> None:
        """Take in what steps cost as measured at the start; what is seen later goes before."""
        self._costs = {nodes: dict(sorted(times.items())) for nodes, times in costs.items()}

    def allowed(self, batch: int) -> list[int]:
        """Numbers of nodes to choose from for a batch of `batch` requests, smallest first."""
        fitting = [nodes for nodes in self._numbers if fits(batch, nodes, self._max_rows)]
        return fitting or self._numbers[:1]

    def choose(self, batch: int) -> int:
        """Nodes that the coming step drafts for each of `batch` requests."""
        size = self._size(batch)
        seen = self._batches.setdefault(size, _Batches())
        allowed = self.allowed(batch)
        if seen.choice not in allowed or seen.left <= 0:
            seen.choice, seen.left = self._best(size, allowed, batch), BLOCK
        seen.left -= 1
        return seen.choice

    def observe(
        self,
        nodes: int,
        emitted: list[int],
        seconds: float | None,
        *,
        batch: int | None = None,
        prompts: bool = False,
    ) -> None:
        """Learn from a step in which every decoding request verified `nodes` drafts.

        Args:
            nodes: drafts that each verified, one of the schedule's numbers.
            emitted: tokens that each emitted.
            seconds: time of the step; None if it says nothing of this number.
            batch: requests in the step, if others than those ran.
            prompts: whether (parts of) prompts ran besides.
        """
        self._acceptance.observe(nodes, emitted)
        self._idle = 0 if nodes else self._idle + 1
        size = self._size(batch or len(emitted))
        seen = self._batches.setdefault(size, _Batches())
        seen.prompts += (prompts - seen.prompts) / _SHARE
        if seconds is None:
            return
        kind = seen.beside if prompts else seen.times
        kind.setdefault(nodes, deque(maxlen=_TIMES)).append(seconds)
        if prompts and (alone := self._alone(size, nodes)) is not None:
            self._timed_prompts = min(self._timed_prompts + 1, _SHARE)
            self._added += (seconds - alone - self._added) / self._timed_prompts

    def _best(self, size: int, allowed: list[int], batch: int) -> int:
        # Of a step on average, prompts or not.
        added = self._batches[size].prompts * max(self._added, 0.0)
        times = {nodes: self._seconds(size, nodes) for nodes in allowed}
        scores = {
            nodes: self._tokens(nodes) / (seconds + added)
            for nodes, seconds in times.items()
            if seconds is not None
        }
        best = max(scores.values(), default=0.0)
        unknown = [
            nodes
            for nodes in allowed
            if nodes not in scores
            and self._tokens(nodes) > best * (self._least(size, nodes) + added)
        ]
        if unknown:
            start = self._schedule[min(batch, len(self._schedule) - 1)]
            return min(unknown, key=lambda nodes: (abs(nodes - start), nodes))
        drafting = [nodes for nodes in scores if nodes]
        if self._idle >= PROBE and drafting:
            return max(drafting, key=scores.__getitem__)
        return max(scores, key=scores.__getitem__)

    def _tokens(self, nodes: int) -> float:
        return 1.0 + self._acceptance.upper(nodes)

    def _seconds(self, size: int, nodes: int) -> float | None:
        """Seconds of a step without prompts, if need be told from those with; None if unknown."""
        alone, beside = self._alone(size, nodes), _median(self._batches[size].beside.get(nodes))
        if alone is not None or beside is None:
            return alone
        return max(beside - self._added, beside / 10)

    def _alone(self, size: int, nodes: int) -> float | None:
        """Seconds of a step without prompts, as seen or as measured at the start."""
        seen = self._batches[size]
        median, seeded = seen.median(nodes), self._seeded(size, nodes)
        if median is not None or seeded is None:
            return median
        # Seeds leave out what all numbers share: the host, the sampler, long contexts.
        more = [
            median - cost
            for other in seen.times
            if (median := seen.median(other)) is not None
            and (cost := self._seeded(size, other)) is not None
        ]
        return max(seeded + (statistics.median(more) if more else 0.0), seeded / 10)

    def _seeded(self, size: int, nodes: int) -> float | None:
        """Seconds as measured at the start, between the numbers of requests that were measured."""
        costs = self._costs.get(nodes)
        if not costs:
            return None
        counts = list(costs)
        place = bisect_left(counts, size)
        if place == len(counts):
            return None
        if place == 0 or counts[place] == size:
            return costs[counts[place]]
        below, above = counts[place - 1], counts[place]
        share = (size - below) / (above - below)
        return costs[below] + share * (costs[above] - costs[below])

    def _least(self, size: int, nodes: int) -> float:
        """Seconds that a step takes at least: as many as smaller batches do, and no drafts."""
        times = [
            median
            for other, seen in self._batches.items()
            if other <= size
            for number in {0, nodes}
            if (median := seen.median(number)) is not None
        ]
        return max(times, default=0.0)

    def _size(self, batch: int) -> int:
        """The size that stands for a batch."""
        return self._sizes[min(bisect_left(self._sizes, batch), len(self._sizes) - 1)]

    def report(self) -> dict[int, dict[str, float]]:
        """Acceptance length by number of nodes, and milliseconds a step by batch size."""
        return {
            nodes: {
                "acceptance_length": self._acceptance.length(nodes) if nodes else 1.0,
                **{
                    f"ms_batch_{size}": 1e3 * seconds
                    for size, seen in sorted(self._batches.items())
                    if (seconds := seen.median(nodes)) is not None
                },
            }
            for nodes in self._numbers
        }


def _median(times: Iterable[float] | None) -> float | None:
    return statistics.median(times) if times else None


def fits(batch: int, nodes: int, max_rows: int) -> bool:
    """Whether `batch` requests may verify `nodes` drafts each within `max_rows` rows."""
    return nodes == 0 or batch * (nodes + 1) <= max_rows
