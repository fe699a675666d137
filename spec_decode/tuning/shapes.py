"""Tree policies: which shape a draft tree gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm_graft.spec_decode.trees.shape import TreeShape, num_candidates

if TYPE_CHECKING:
    from vllm_graft.spec_decode.config.tree_config import TreeConfig


class TreePolicy(Protocol):
    """Chooses the shape of the trees, once for each number of nodes, when the engine is built."""

    def __call__(self, config: TreeConfig, num_nodes: int) -> TreeShape:
        """Return the shape of a tree of which the engine verifies `num_nodes` drafts."""
        ...


def dynamic(config: TreeConfig, num_nodes: int) -> TreeShape:
    """EAGLE-2's dynamic tree with the configured `topk` and `steps`.

    A tree of n nodes is drafted no wider and no deeper than n. That does not change which nodes are
    kept, because a node is kept only after all better ones of its level, and after its ancestors.

    With ``shape: auto`` the configured numbers are bounds, and trees of few nodes are drafted
    narrower or shallower still, because each level costs the draft ``topk`` rows per request.
    """
    if config.shape == "auto":
        for shape, _ in _rungs(config, num_nodes):
            if shape.num_nodes == num_nodes:
                return shape
    return whole(config, num_nodes)


def whole(config: TreeConfig, num_nodes: int) -> TreeShape:
    """The configured `topk` and `steps`, even with ``shape: auto``.

    Only what can't change a tree is left out: one of n nodes is no wider and no deeper than n.
    """
    return TreeShape(min(config.topk, num_nodes), min(config.steps, num_nodes), num_nodes)


WHOLE_BLOCKS = 30
"""From so many nodes on, a block drafter's tree with ``shape: auto`` has all `topk` and `steps`.

Such trees are for a few requests at a time, whose levels cost little."""


def for_blocks(config: TreeConfig, num_nodes: int) -> TreeShape:
    """`dynamic` for drafters whose levels take no pass of a draft."""
    return (whole if num_nodes >= WHOLE_BLOCKS else dynamic)(config, num_nodes)


_LADDER = (
    # topk, steps, nodes, largest batch at which it is tried first.
    (1, 1, 1, 127),
    (2, 2, 2, 112),
    (2, 3, 3, 96),
    (4, 4, 6, 36),
    (4, 7, 7, 32),
    (8, 4, 14, 10),
    (4, 8, 15, 8),
    (8, 5, 30, 4),
    (4, 12, 31, 3),
    (8, 7, 63, 1),
)
"""Shapes of ``shape: auto``. For each cost of verification there is a wide one and a deep one, as
easily predicted text favours depth and sampled text favours width. Including their roots, they make
numbers of rows that suit matrix products. They were chosen by measurement: for each batch and text
one of them is close to the best that was tried (docs/records/2026-11-tuning.md, "what each
shape yields")."""

_WIDEST_STEPS = 7
"""Levels of the widest tree for a number of nodes that is not in the ladder."""


def _rungs(config: TreeConfig, num_nodes: int) -> list[tuple[TreeShape, int]]:
    """The ladder within the configured bounds, cheapest first: shapes and their largest batches."""
    rungs: dict[int, tuple[TreeShape, int]] = {}
    for topk, steps, nodes, batch in _LADDER:
        topk, steps = min(topk, config.topk), min(steps, config.steps)
        nodes = min(nodes, num_candidates(topk, steps))
        if nodes <= num_nodes:
            rungs.setdefault(nodes, (TreeShape(topk, steps, nodes), batch))
    rungs.setdefault(num_nodes, (_widest(config, num_nodes), 1))
    return [rungs[nodes] for nodes in sorted(rungs)]


def _widest(config: TreeConfig, num_nodes: int) -> TreeShape:
    """The widest tree of that many nodes, no deeper than it takes to hold them."""
    steps = min(_WIDEST_STEPS, config.steps)
    while steps < config.steps and num_candidates(config.topk, steps) < num_nodes:
        steps += 1
    return TreeShape(config.topk, steps, num_nodes)


def auto_schedule(
    config: TreeConfig, num_nodes: int, max_num_seqs: int
) -> list[tuple[int, int, int]]:
    """What ``shape: auto`` starts from: ``(first batch, last batch, nodes)``, widest trees first.

    The form is that of vLLM's ``num_speculative_tokens_per_batch_size``. The number of nodes
    identifies a shape: it is what the scheduler tells the workers. The last range has no drafts, so
    that vLLM also captures the graphs for where speculation does not pay. vLLM only learns of
    numbers of nodes that belong to a batch of up to `max_num_seqs` requests, so ranges shrink until
    every number has such a batch.
    """
    wanted = [(shape.num_nodes, batch) for shape, batch in reversed(_rungs(config, num_nodes))]
    wanted = [*wanted, (0, max_num_seqs)][:max_num_seqs]
    ranges, first = [], 1
    for left, (nodes, batch) in zip(reversed(range(len(wanted))), wanted):
        last = max(first, min(batch, max_num_seqs - left)) if left else max_num_seqs
        ranges.append((first, last, nodes))
        first = last + 1
    return ranges
