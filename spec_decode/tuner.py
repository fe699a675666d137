"""How many nodes pay: learned while serving, from the time of steps and the tokens they yield."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

BLOCK = 6
"""Steps for which a choice is kept: the first after a change can't be timed."""

MEMORY = 4096.0
"""Verified trees after which what was seen of them counts for 1/e."""

_TIMES = 8
"""Recent step times of which the median is believed."""

_SHARE = 64.0
"""Steps over which the share of those with prompts is averaged."""


@dataclass
class Yield:
    """Emitted tokens a tree, bonus token included; older trees count less."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def fade(self, factor: float) -> None:
        """Count everything so far `factor` times."""
        self.weight *= factor
        self.total *= factor
        self.squares *= factor

    def add(self, emitted: list[int]) -> None:
        """Add the tokens that each request of a step emitted."""
        self.weight += len(emitted)
        self.total += sum(emitted)
        self.squares += sum(count * count for count in emitted)

    @property
    def mean(self) -> float:
        """Mean acceptance length."""
        return self.total / self.weight

    def upper(self) -> float:
        """Mean plus its standard error: what it may be where little was seen."""
        spread = max(self.squares / self.weight - self.mean**2, 0.25)
        return self.mean + math.sqrt(spread / self.weight)


@dataclass
class _Batches:
    """What is known of the batches of one power of two.

    Attributes:
        times: recent seconds of steps, by number of nodes and by whether prompts ran besides.
        prompts: share of the steps in which they did, the recent ones above all.
        choice: the number of nodes in use, for `left` more steps.
    """

    times: dict[tuple[int, bool], deque[float]] = field(default_factory=dict)
    prompts: float = 0.0
    choice: int | None = None
    left: int = 0

    def observe(self, nodes: int, seconds: float | None, prompts: bool) -> None:
        """Take in a step; None is a time that tells nothing."""
        self.prompts += (prompts - self.prompts) / _SHARE
        if seconds is not None:
            self.times.setdefault((nodes, prompts), deque(maxlen=_TIMES)).append(seconds)

    def knows(self, nodes: int) -> bool:
        """Whether a step of so many nodes was timed."""
        return (nodes, False) in self.times or (nodes, True) in self.times

    def seconds(self, nodes: int) -> float:
        """Of an average step, prompts or not.

        Prompts take their time whatever is drafted, so that a number that was seen with them only,
        or without them only, is compared by what they add elsewhere.
        """
        added = self._added()
        alone, beside = self._median(nodes, False), self._median(nodes, True)
        if alone is None:
            assert beside is not None
            alone = max(beside - added, beside / 10)
        if beside is None:
            beside = alone + added
        return alone + self.prompts * (beside - alone)

    def _median(self, nodes: int, prompts: bool) -> float | None:
        times = self.times.get((nodes, prompts))
        return statistics.median(times) if times else None

    def _added(self) -> float:
        """Seconds that prompts add to a step."""
        both = [nodes for nodes, prompts in self.times if prompts and (nodes, False) in self.times]
        differences = [
            statistics.median(self.times[nodes, True]) - statistics.median(self.times[nodes, False])
            for nodes in both
        ]
        return max(0.0, statistics.median(differences)) if differences else 0.0


class NodeTuner:
    """Chooses the number of nodes that yields the most tokens a second (discounted UCB).

    Acceptance depends on the text and hardly on the batch, so all batch sizes share it; the time
    of a step depends on both, and is kept by power of two of the batch size, with prompts besides
    and without. Each choice lasts `BLOCK` steps. The score of a number of nodes is the upper bound
    of its acceptance length over the time of a step; one that has not been used for long gets a
    wide bound, and with it a new trial (Garivier and Moulines 2011, arXiv:0805.3415). Where a time
    is not known the number is tried first, beginning at what the schedule says.

    Args:
        schedule: nodes by number of requests in the batch, index 0 not used; its distinct values
            are the numbers to choose from.
        max_rows: rows, root and nodes of all requests, that a step may verify; with more
            requests than fit even at the smallest number, this number is chosen.
    """

    def __init__(self, schedule: list[int], max_rows: int) -> None:
        self._schedule = schedule
        self._max_rows = max_rows
        self._numbers = sorted(set(schedule[1:]))
        self._yields = {nodes: Yield() for nodes in self._numbers}
        self._batches: dict[int, _Batches] = {}

    def allowed(self, batch: int) -> list[int]:
        """Numbers of nodes to choose from for a batch of `batch` requests, smallest first."""
        fitting = [nodes for nodes in self._numbers if fits(batch, nodes, self._max_rows)]
        return fitting or self._numbers[:1]

    def choose(self, batch: int) -> int:
        """Nodes that the coming step drafts for each of `batch` requests."""
        seen = self._batches.setdefault(_power(batch), _Batches())
        allowed = self.allowed(batch)
        if seen.choice not in allowed or seen.left <= 0:
            seen.choice, seen.left = self._best(seen, allowed, batch), BLOCK
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
        factor = math.exp(-len(emitted) / MEMORY)
        for each in self._yields.values():
            each.fade(factor)
        self._yields[nodes].add(emitted)
        power = _power(batch or len(emitted))
        self._batches.setdefault(power, _Batches()).observe(nodes, seconds, prompts)

    def _best(self, seen: _Batches, allowed: list[int], batch: int) -> int:
        start = self._schedule[min(batch, len(self._schedule) - 1)]
        unknown = [nodes for nodes in allowed if not seen.knows(nodes)]
        if unknown:
            return min(unknown, key=lambda nodes: (abs(nodes - start), nodes))
        return max(allowed, key=lambda nodes: self._score(seen, nodes))

    def _score(self, seen: _Batches, nodes: int) -> float:
        return self._expected(nodes) / seen.seconds(nodes)

    def _expected(self, nodes: int) -> float:
        """Tokens that a tree of `nodes` may yield: all of them where nothing is known any more."""
        found = self._yields[nodes]
        if nodes and found.weight < 0.1:
            return nodes + 1.0
        return found.upper() if nodes else 1.0

    def report(self) -> dict[int, dict[str, float]]:
        """Acceptance length by number of nodes, and milliseconds a step by power of two."""
        return {
            nodes: {
                "acceptance_length": found.mean if found.weight else 0.0,
                **{
                    f"ms_batch_{1 << power}": 1e3 * seen.seconds(nodes)
                    for power, seen in sorted(self._batches.items())
                    if seen.knows(nodes)
                },
            }
            for nodes, found in self._yields.items()
        }


def fits(batch: int, nodes: int, max_rows: int) -> bool:
    """Whether `batch` requests may verify `nodes` drafts each within `max_rows` rows."""
    return nodes == 0 or batch * (nodes + 1) <= max_rows


def _power(batch: int) -> int:
    """The smallest power of two that holds the batch, as its exponent."""
    return max(batch - 1, 0).bit_length()
