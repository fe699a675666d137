"""The shapes that ``shape: auto`` chooses among: one ladder for dense drafts, one for experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_graft.spec_decode.trees.shape import TreeShape, num_candidates

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import TreeConfig


class Rung(NamedTuple):
    """A shape of a ladder.

    Attributes:
        topk: children per node, and nodes per level that get children.
        steps: levels.
        nodes: nodes of the tree.
        batch: the largest batch at which it is tried first, before anything was measured.
    """

    topk: int
    steps: int
    nodes: int
    batch: int


@dataclass(frozen=True)
class Ladder:
    """Shapes for growing costs of verification.

    Attributes:
        rungs: fewest nodes first; a number of nodes occurs once.
        narrow: whether a number of nodes without a rung is as wide as the next larger rung. If not,
            it is as wide as configured.
    """

    rungs: tuple[Rung, ...]
    narrow: bool = False

    def within(self, config: TreeConfig, num_nodes: int) -> list[tuple[TreeShape, int]]:
        """Shapes within the configured bounds, cheapest first, and their largest batches.

        Args:
            config: its `topk` and `steps` are bounds.
            num_nodes: nodes of the largest shape.
        """
        found: dict[int, tuple[TreeShape, int]] = {}
        for rung in self.rungs:
            topk, steps = min(rung.topk, config.topk), min(rung.steps, config.steps)
            nodes = min(rung.nodes, num_candidates(topk, steps))
            if nodes <= num_nodes:
                found.setdefault(nodes, (TreeShape(topk, steps, nodes), rung.batch))
        found.setdefault(num_nodes, (self._largest(config, num_nodes), 1))
        return [found[nodes] for nodes in sorted(found)]

    def _largest(self, config: TreeConfig, num_nodes: int) -> TreeShape:
        """The shape of a number of nodes without a rung, no larger than it takes to hold them."""
        topk, steps = config.topk, _WIDEST_STEPS
        if self.narrow:
            above = [rung for rung in self.rungs if rung.nodes >= num_nodes] or self.rungs[-1:]
            topk, steps = above[0].topk, min(above[0].steps, num_nodes)
        topk, steps = min(topk, config.topk), min(steps, config.steps)
        while steps < config.steps and num_candidates(topk, steps) < num_nodes:
            steps += 1
        while topk < config.topk and num_candidates(topk, steps) < num_nodes:
            topk += 1
        return TreeShape(topk, steps, num_nodes)


_WIDEST_STEPS = 7
"""Levels of the widest tree for a number of nodes that has no rung."""

DENSE = Ladder(
    (
        Rung(1, 1, 1, 127),
        Rung(2, 2, 2, 112),
        Rung(2, 3, 3, 96),
        Rung(4, 4, 6, 36),
        Rung(4, 7, 7, 32),
        Rung(8, 4, 14, 10),
        Rung(4, 8, 15, 8),
        Rung(8, 5, 30, 4),
        Rung(4, 12, 31, 3),
        Rung(8, 7, 63, 1),
    ),
)
"""For dense drafts. For each cost of verification there is a wide shape and a deep one, as easily
predicted text favours depth and sampled text favours width. Including their roots, they make
numbers of rows that suit matrix products. They were chosen by measurement: for each batch and text
one of them is close to the best that was tried."""

NARROW = Ladder(
    (
        Rung(1, 1, 1, 127),
        Rung(1, 2, 2, 96),
        Rung(1, 3, 3, 32),
        Rung(1, 5, 5, 16),
        Rung(2, 3, 6, 10),
        Rung(1, 7, 7, 8),
        Rung(3, 4, 14, 4),
        Rung(2, 8, 15, 3),
        Rung(4, 8, 31, 2),
        Rung(8, 7, 63, 1),
    ),
    narrow=True,
)
"""For drafts that are mixtures of experts. Each row of a level reads experts of its own, so that a
level costs as much as it is wide, and few nodes come from levels of one row. They were chosen by
simulation."""
