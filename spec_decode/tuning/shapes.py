"""Tree policies: which shape a draft tree gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm_graft.spec_decode.trees.shape import TreeShape, num_candidates

if TYPE_CHECKING:
    from vllm_graft.config import EagleConfig


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
"""Shapes of ``tree: auto``: for each cost of verification a wide and a deep one, as text that is
easy to predict wants depth and sampled text wants width. Roots included, they make the numbers of
rows that matrix products like. Chosen by what an H200 measured (docs/benchmarks.md): for each batch
and text one of these is within 2 % of the best of all that were tried."""

_WIDEST_STEPS = 7
"""Levels of a widest tree of another number of nodes than the ladder's."""


def _rungs(config: EagleConfig, num_nodes: int) -> list[tuple[TreeShape, int]]:
    """The ladder within its bounds, cheapest first: shapes, and their first batches."""
    rungs: dict[int, tuple[TreeShape, int]] = {}
    for topk, steps, nodes, batch in _LADDER:
        topk, steps = min(topk, config.topk), min(steps, config.steps)
        nodes = min(nodes, num_candidates(topk, steps))
        if nodes <= num_nodes:
            rungs.setdefault(nodes, (TreeShape(topk, steps, nodes), batch))
    rungs.setdefault(num_nodes, (_widest(config, num_nodes), 1))
    return [rungs[nodes] for nodes in sorted(rungs)]


def _widest(config: EagleConfig, num_nodes: int) -> TreeShape:
    """A tree of that many nodes, no deeper than it takes to hold them."""
    steps = min(_WIDEST_STEPS, config.steps)
    while steps < config.steps and num_candidates(config.topk, steps) < num_nodes:
        steps += 1
    return TreeShape(config.topk, steps, num_nodes)


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
