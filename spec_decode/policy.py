"""Tree policies: how wide and how deep a draft tree may grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_graft.config import EagleConfig


def num_candidates(topk: int, steps: int) -> int:
    """Candidates after ``steps`` levels: ``topk`` at level 0, ``topk ** 2`` at each later one."""
    return topk + (steps - 1) * topk * topk


@dataclass(frozen=True)
class TreeShape:
    """Bounds of a draft tree.

    Attributes:
        topk: children tried a node, and nodes kept a level for the next one.
        steps: levels below the root; the draft runs ``steps - 1`` times after its extend pass.
        num_nodes: drafted nodes kept for verification, the root not counted.
    """

    topk: int
    steps: int
    num_nodes: int

    @property
    def num_candidates(self) -> int:
        """Nodes that drafting scores, of which `num_nodes` are kept (EAGLE-2, section 4.2)."""
        return num_candidates(self.topk, self.steps)


class TreePolicy(Protocol):
    """Chooses the shape of the trees, once for each number of nodes, when the engine is built."""

    def __call__(self, config: EagleConfig, num_nodes: int) -> TreeShape:
        """Return the shape of a tree of which the engine verifies `num_nodes` drafts."""
        ...


def dynamic(config: EagleConfig, num_nodes: int) -> TreeShape:
    """EAGLE-2's dynamic tree with the configured `topk` and `steps`.

    A tree of fewer nodes is drafted no wider and no deeper than that, which changes nothing: a
    node is kept only after all better ones of its level, and after its ancestors.

    With ``tree: auto`` the configured numbers are bounds, and few nodes are drafted narrower or
    shallower yet: what the draft costs, K rows a request and level, has to pay.
    """
    if config.tree == "auto":
        for shape, _ in _rungs(config, num_nodes):
            if shape.num_nodes == num_nodes:
                return shape
    return TreeShape(min(config.topk, num_nodes), min(config.steps, num_nodes), num_nodes)


_LADDER = (
    # topk, steps, nodes, largest batch at which it is tried first.
    (2, 3, 3, 96),
    (2, 5, 5, 48),
    (4, 4, 7, 32),
    (4, 7, 9, 16),
    (8, 4, 14, 8),
    (8, 7, 15, 6),
    (8, 4, 30, 4),
    (8, 7, 31, 3),
    (8, 4, 46, 2),
    (8, 7, 47, 1),
)
"""Shapes of ``tree: auto``: for each cost of verification a wide and a deep one, as text that is
easy to predict wants depth and sampled text wants width. Roots included, they make the numbers of
rows that matrix products like."""


def _rungs(config: EagleConfig, num_nodes: int) -> list[tuple[TreeShape, int]]:
    """The ladder within its bounds, cheapest first: shapes, and their first batches."""
    rungs: dict[int, tuple[TreeShape, int]] = {}
    for topk, steps, nodes, batch in _LADDER:
        topk, steps = min(topk, config.topk), min(steps, config.steps)
        nodes = min(nodes, num_candidates(topk, steps))
        if nodes <= num_nodes:
            rungs.setdefault(nodes, (TreeShape(topk, steps, nodes), batch))
    rungs.setdefault(num_nodes, (TreeShape(config.topk, config.steps, num_nodes), 1))
    return [rungs[nodes] for nodes in sorted(rungs)]


def auto_schedule(
    config: EagleConfig, num_nodes: int, max_num_seqs: int
) -> list[tuple[int, int, int]]:
    """What ``tree: auto`` starts from: ``(first batch, last batch, nodes)``, widest trees first.

    In the form of vLLM's ``num_speculative_tokens_per_batch_size``. The number of nodes identifies
    a shape: it is what the scheduler tells the workers. The last range is without drafts, so that
    vLLM also captures what runs where speculation does not pay. vLLM knows the numbers of batches
    up to `max_num_seqs` only, so ranges give way until every number has a batch.
    """
    wanted = [(shape.num_nodes, batch) for shape, batch in reversed(_rungs(config, num_nodes))]
    wanted = [*wanted, (0, max_num_seqs)][:max_num_seqs]
    ranges, first = [], 1
    for left, (nodes, batch) in zip(reversed(range(len(wanted))), wanted):
        last = max(first, min(batch, max_num_seqs - left)) if left else max_num_seqs
        ranges.append((first, last, nodes))
        first = last + 1
    return ranges
