"""Tree policies, which give a tree its shape, and the ladders that ``shape: auto`` chooses from."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.trees.tree import TreeShape, num_candidates


class Rung(NamedTuple):
    """A shape of a ladder, and the largest batch at which it is tried before measurements."""

    topk: int
    steps: int
    nodes: int
    batch: int


@dataclass(frozen=True)
class Ladder:
    """Shapes for growing costs of verification, fewest nodes first. A number of nodes without a
    rung is as wide as the next larger one if the ladder is `narrow`, else as configured."""

    rungs: tuple[Rung, ...]
    narrow: bool = False

    def within(self, config: TreeConfig, num_nodes: int) -> list[tuple[TreeShape, int]]:
        """Shapes within the configured `topk` and `steps`, cheapest first, up to one of `num_nodes`
        nodes, and their largest batches."""
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
"""For dense drafts. For each cost there is a wide shape for sampled text and a deep one for easily
predicted text; with their roots they make numbers of rows that suit matrix products. Chosen by
measurement: for each batch and text one of them is close to the best that was tried."""

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
"""For drafts that are mixtures of experts, chosen by simulation. Each row of a level reads experts
of its own, so few nodes come from levels of one row."""


class TreePolicy(Protocol):
    """Chooses the shape of the trees, once for each number of nodes, when the engine is built."""

    def __call__(self, config: TreeConfig, num_nodes: int) -> TreeShape:
        """Return the shape of a tree of which the engine verifies `num_nodes` drafts."""


def dynamic(config: TreeConfig, num_nodes: int) -> TreeShape:
    """EAGLE-2's dynamic tree with the configured `topk` and `steps`. A tree of n nodes is drafted
    no wider and no deeper than n, which changes none of its nodes. With ``shape: auto`` the numbers
    are bounds, and small trees are narrower or shallower still."""
    return _on(DENSE, config, num_nodes)


def for_experts(config: TreeConfig, num_nodes: int) -> TreeShape:
    """`dynamic` for drafts with experts, each of whose rows costs: ``auto`` is narrower still."""
    return _on(NARROW, config, num_nodes)


def _on(ladder: Ladder, config: TreeConfig, num_nodes: int) -> TreeShape:
    if config.shape == "auto":
        *_, (shape, _) = ladder.within(config, num_nodes)
        return shape
    return whole(config, num_nodes)


def whole(config: TreeConfig, num_nodes: int) -> TreeShape:
    """The configured `topk` and `steps`, even with ``shape: auto``, but neither above the nodes."""
    return TreeShape(min(config.topk, num_nodes), min(config.steps, num_nodes), num_nodes)


WHOLE_BLOCKS = 30
"""From so many nodes on, a block drafter's tree with ``shape: auto`` has all `topk` and `steps`:
such trees are for few requests, whose levels cost little."""


def for_blocks(config: TreeConfig, num_nodes: int) -> TreeShape:
    """`dynamic` for drafters whose levels take no pass of a draft."""
    return (whole if num_nodes >= WHOLE_BLOCKS else dynamic)(config, num_nodes)


def auto_schedule(
    config: TreeConfig,
    num_nodes: int,
    max_num_seqs: int,
    ladder: Ladder = DENSE,
    *,
    rests: bool = False,
) -> list[tuple[int, int, int]]:
    """The table that ``shape: auto`` starts from: ``(first batch, last batch, nodes)``, widest
    trees first.

    Its form is that of vLLM's ``num_speculative_tokens_per_batch_size``; the number of nodes
    identifies a shape. The last range has no drafts, so that vLLM captures graphs for these, too.
    Only numbers with a batch of up to `max_num_seqs` requests exist for vLLM, so ranges shrink
    until each has one. With fewer batches than numbers, the widest trees stay, or a spread of a
    narrow ladder, where few nodes may pay for one request, too. With `rests` no drafts stay, too,
    if there are two batches: most texts have nothing to draft."""
    rungs = ladder.within(config, num_nodes)
    wanted = [(shape.num_nodes, batch) for shape, batch in reversed(rungs)]
    wanted = [*wanted, (0, max_num_seqs)]
    few = min(len(wanted), max_num_seqs)
    if rests and 1 < few < len(wanted):
        wanted = [*_spread(wanted[:-1], few - 1), wanted[-1]]
    elif ladder.narrow:
        wanted = _spread(wanted, few)
    wanted = wanted[:few]
    ranges, first = [], 1
    for left, (nodes, batch) in zip(reversed(range(len(wanted))), wanted):
        last = max(first, min(batch, max_num_seqs - left)) if left else max_num_seqs
        ranges.append((first, last, nodes))
        first = last + 1
    return ranges


def _spread(wanted: list[tuple[int, int]], few: int) -> list[tuple[int, int]]:
    """So many of them, as far from each other as from the ends."""
    return [wanted[(2 * place + 1) * len(wanted) // (2 * few)] for place in range(few)]
