"""How many nodes pay: learned while serving, from the time of steps and the tokens they yield."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_graft.spec_decode.tuning.acceptance import Acceptance
from vllm_graft.spec_decode.tuning.step_times import Costs, StepTimes

BLOCK = 6
"""Steps for which a choice is kept: the first after a change can't be timed."""

PROBE = 256
"""Steps without drafts after which a block of them is tried again: the text may have changed."""

STEADY = 8
"""Steps of a batch's size after which their times are believed more than those measured."""

_SHARE = 64
"""Steps over which the share of those with prompts is averaged."""


@dataclass
class _Batches:
    """Batches of one size.

    Attributes:
        steps: so many, up to those that `prompts` is averaged over.
        prompts: share of the steps in which prompts ran, the recent ones above all.
        tokens: that a request emitted in a step on average, likewise.
        rows: of prompts, in each of the recent steps.
        choice: the number of nodes in use, for `left` more steps.
    """

    steps: float = 0.0
    prompts: float = 0.0
    tokens: float = 1.0
    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_SHARE))
    choice: int | None = None
    left: int = 0


class NodeTuner:
    """Chooses the number of nodes that yields the most tokens a second.

    Acceptance depends on the text and hardly on the batch, so all batch sizes share it (see
    `Acceptance`); the time of a step depends on both, and is kept by size (see `StepTimes`), with
    and without prompts beside the trees. Each choice lasts `BLOCK` steps. The score of a number of
    nodes is the upper bound of its acceptance length over the time of a step on average, so that
    what may be better is tried. A number of which no time is known is tried, unless it could not be
    the best even if it took no longer than at a smaller size.

    Args:
        schedule: nodes by number of requests in the batch, index 0 not used; its distinct values
            are the numbers to choose from.
        max_rows: rows, root and nodes of all requests, that a step may verify; with more
            requests than fit even at the smallest number, this number is chosen.
        sizes: numbers of requests, ascending, whose batches are alike: those up to a size, and
            above the size before. None is powers of two.
        levels: of the trees of each number of nodes; as many as nodes where it has none.
    """

    def __init__(
        self,
        schedule: list[int],
        max_rows: int,
        sizes: Sequence[int] | None = None,
        levels: Mapping[int, int] | None = None,
    ) -> None:
        self._schedule = schedule
        self._max_rows = max_rows
        self._sizes = list(sizes or (1 << power for power in range(len(schedule).bit_length())))
        self._numbers = sorted(set(schedule[1:]))
        self._acceptance = Acceptance({n: (levels or {}).get(n, n) for n in self._numbers})
        self._times = StepTimes()
        self._beside = StepTimes(prompts=True)
        self._batches: dict[int, _Batches] = {}
        self._idle = 0
        self._last_size = self._steady = 0

    def seed(self, costs: Costs) -> None:
        """Take in what steps cost as measured at the start."""
        self._times.seed(costs)
        self._beside.seed(costs)

    @property
    def costs(self) -> Costs:
        """What was measured at the start."""
        return self._times.costs

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
            captured = self._captured(seen, allowed, batch)
            seen.choice, seen.left = self._best(size, captured, batch), BLOCK
        seen.left -= 1
        return seen.choice

    def observe(
        self,
        nodes: int,
        emitted: list[int],
        seconds: float | None,
        *,
        batch: int | None = None,
        prompts: int = 0,
        same: bool = True,
        heat: float = 0.0,
    ) -> None:
        """Learn from a step in which every decoding request verified `nodes` drafts.

        Args:
            nodes: drafts that each verified, one of the schedule's numbers.
            emitted: tokens that each emitted.
            seconds: time of the step; None if it says nothing of this number.
            batch: requests in the step, if others than those ran.
            prompts: rows of (parts of) prompts that ran besides.
            same: whether most of these requests were in the decoding step before.
            heat: their temperature on average.
        """
        size = self._size(batch or len(emitted))
        alike = size == self._last_size
        self._last_size, self._steady = size, (self._steady + 1) * alike
        self._acceptance.observe(nodes, emitted, alike=alike, same=same, heat=heat)
        self._idle = 0 if nodes else self._idle + 1
        seen = self._batches.setdefault(size, _Batches())
        seen.steps = min(seen.steps + 1, _SHARE)
        seen.prompts += ((prompts > 0) - seen.prompts) / seen.steps
        seen.tokens += (sum(emitted) / max(1, len(emitted)) - seen.tokens) / seen.steps
        seen.rows.append(prompts)
        if seconds is None:
            return
        if self._steady < STEADY and self._times.measured(size, nodes) is not None:
            # A new batch comes with work that is done once.
            return
        (self._beside if prompts else self._times).observe(size, nodes, seconds)

    def _captured(self, seen: _Batches, allowed: list[int], batch: int) -> list[int]:
        """Without those that leave most steps, which a smaller number's graphs hold, without one.

        What a step takes then is not known before it is tried, and a trial is long: the host
        launches it piece by piece. More tokens a step bring more prompts here, too.
        """
        prompts = sorted(rows for rows in seen.rows if rows)

        def held(nodes: int, share: float) -> float:
            """Of the steps, if `share` of them had prompts."""
            fitting = bisect_right(prompts, self._max_rows - batch * (nodes + 1))
            return 1.0 - share + share * (fitting / len(prompts) if prompts else 1.0)

        shares = {nodes: self._share(seen, nodes) for nodes in allowed}
        smallest = allowed[0]
        return [n for n, share in shares.items() if 2 * held(n, share) >= held(smallest, share)]

    def _best(self, size: int, allowed: list[int], batch: int) -> int:
        times, added = self._seconds(size, allowed)
        scores = {nodes: self._tokens(nodes) / seconds for nodes, seconds in times.items()}
        best = max(scores.values(), default=0.0)
        unknown = [
            nodes
            for nodes in allowed
            if nodes not in scores
            and self._tokens(nodes) > best * (self._times.least(size, nodes) + added)
        ]
        if unknown:
            start = self._schedule[min(batch, len(self._schedule) - 1)]
            return min(unknown, key=lambda nodes: (abs(nodes - start), nodes))
        drafting = [nodes for nodes in scores if nodes]
        if self._idle >= PROBE and drafting:
            return max(drafting, key=scores.__getitem__)
        return max(scores, key=scores.__getitem__)

    def _seconds(self, size: int, allowed: list[int]) -> tuple[dict[int, float], float]:
        """Of a step on average, prompts or not, as far as known; and what prompts add to that."""
        alone, beside = (
            {n: seconds for n in allowed if (seconds := times.predict(size, n)) is not None}
            for times in (self._times, self._beside)
        )
        both = [beside[nodes] - alone[nodes] for nodes in alone if nodes in beside]
        added = max(sum(both) / len(both), 0.0) if both else 0.0
        seen = self._batches[size]
        found = {}
        for nodes in {*alone, *beside}:
            # Where only the one is known, it is better than to wait for the other.
            more = beside.get(nodes, alone.get(nodes, 0.0) + added)
            less = alone.get(nodes, max(more - added, min(alone.values(), default=more)))
            found[nodes] = less + self._share(seen, nodes) * (more - less)
        return found, seen.prompts * added

    def _share(self, seen: _Batches, nodes: int) -> float:
        """Of the steps those that would have prompts in them.

        A request that ends makes place for another: there are as many prompts a token, not a step.
        """
        return min(1.0, seen.prompts * self._tokens(nodes) / seen.tokens)

    def _tokens(self, nodes: int) -> float:
        return 1.0 + self._acceptance.upper(nodes)

    def _size(self, batch: int) -> int:
        """The size that stands for a batch."""
        return self._sizes[min(bisect_left(self._sizes, batch), len(self._sizes) - 1)]

    def report(self) -> dict[int, dict[str, float]]:
        """Acceptance length by number of nodes, and milliseconds a step by batch size."""
        return {
            nodes: {
                "acceptance_length": self._acceptance.length(nodes),
                **{
                    f"ms_batch_{size}": 1e3 * seconds
                    for size, seconds in self._times.seen(nodes).items()
                },
            }
            for nodes in self._numbers
        }


def fits(batch: int, nodes: int, max_rows: int) -> bool:
    """Whether `batch` requests may verify `nodes` drafts each within `max_rows` rows."""
    return nodes == 0 or batch * (nodes + 1) <= max_rows
