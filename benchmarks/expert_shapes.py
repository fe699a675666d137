"""How close the shapes of ``shape: auto`` come to the best one, where a draft has experts.

    python -m benchmarks.expert_shapes

Nothing is measured: tokens per second are computed, for texts whose draft guesses right with known
chances, and for all costs that a draft's and a target's rows had on an H100, roughly. A row reads
experts of its own, of which there are so many that few rows share some. Printed is the throughput
with the best shape of a ladder over that of the best of all shapes: the mean and the worst.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from typing import NamedTuple

from tests.support.moe_world import experts
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.trees.shape import TreeShape, num_candidates
from vllm_graft.spec_decode.tuning.ladders import DENSE, NARROW, Ladder

BOUNDS = TreeConfig(topk=8, steps=12, shape="auto")
BATCHES = (1, 4, 16)

TEXTS = {
    "hard": (0.58, 0.16, 0.07, 0.04),
    "usual": (0.70, 0.10, 0.05, 0.03),
    "easy": (0.85, 0.07, 0.02, 0.01),
}
"""Chances that a draft's first, second, third and fourth guess is right, at each depth."""

STEP_MS = 3.3
"""A step of one request without drafts."""

OWN_WORK = 0.1
"""What a row costs even if others have asked for all experts, in parts of a lone row's cost."""


class Costs(NamedTuple):
    """What a step costs besides.

    Attributes:
        level_ms: a level of the draft.
        draft_ms: a lone row of a level.
        target_ms: a lone row of the target.
        experts: how many there are.
        asked: for how many of them a row asks.
    """

    level_ms: float
    draft_ms: float
    target_ms: float
    experts: int
    asked: int

    def rows(self, count: int) -> float:
        """Return what rows cost, in parts of a lone row's cost; each asks for random experts."""
        return experts(count, self.experts, self.asked) / self.asked + OWN_WORK * count

    def step_ms(self, batch: int, shape: TreeShape | None) -> float:
        """Return milliseconds of a step, without drafts where there is no shape."""
        if shape is None:
            return STEP_MS + self.target_ms * (self.rows(batch) - self.rows(1))
        passes = min(shape.steps, shape.num_nodes) - 1
        level = self.level_ms + self.draft_ms * self.rows(batch * shape.topk)
        rows = self.rows(batch * (shape.num_nodes + 1))
        extend = self.draft_ms * rows / 2
        return STEP_MS + self.target_ms * (rows - self.rows(1)) + extend + passes * level


KINDS = ((128, 10), (256, 8), (512, 10))
"""Experts, and how many a row asks for."""

COSTS = [
    Costs(level, draft, target, *kind)
    for level, draft, target, kind in itertools.product(
        (0.05, 0.15), (0.03, 0.07, 0.13), (0.06, 0.13, 0.3), KINDS
    )
]

SHAPES = [
    TreeShape(topk, steps, nodes)
    for topk in (1, 2, 3, 4, 6, 8)
    for steps in range(1, 13)
    for nodes in (*range(1, 11), 12, 14, 15, 18, 23, 30, 31, 47, 63)
    if max(steps, topk) <= nodes <= num_candidates(topk, steps)
]


@functools.cache
def length(text: str, shape: TreeShape | None) -> float:
    """Return tokens per step of a dynamic tree, the bonus token included."""
    if shape is None:
        return 1.0
    frontier, found = [1.0], list[float]()
    for _ in range(shape.steps):
        level = [chance * each for chance in frontier for each in TEXTS[text][: shape.topk]]
        frontier = sorted(level, reverse=True)[: shape.topk]
        found += level
    return 1 + sum(sorted(found, reverse=True)[: shape.num_nodes])


def rungs(ladder: Ladder) -> list[TreeShape]:
    """Return the shapes of a ladder."""
    return [shape for shape, _ in ladder.within(BOUNDS, ladder.rungs[-1].nodes)]


def ratios(ladder: Ladder, batch: int) -> list[float]:
    """Return throughput with the ladder's best over the best of all, by text and costs."""
    own = rungs(ladder)

    def best(shapes: list[TreeShape], text: str, costs: Costs) -> float:
        return max(length(text, each) / costs.step_ms(batch, each) for each in [*shapes, None])

    return [
        best(own, text, costs) / best([*SHAPES, *own], text, costs)
        for text in TEXTS
        for costs in COSTS
    ]


def main() -> None:
    """Print a row per ladder and batch."""
    print("| ladder | requests | mean | worst |\n|---|---|---|---|")
    for name, ladder in (("of dense drafts", DENSE), ("narrow", NARROW)):
        for batch in BATCHES:
            found = ratios(ladder, batch)
            print(f"| {name} | {batch} | {statistics.mean(found):.3f} | {min(found):.3f} |")


if __name__ == "__main__":
    main()
