"""Tree policies: which shape a draft tree gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.tuning.ladders import DENSE, NARROW, Ladder

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


def auto_schedule(
    config: TreeConfig, num_nodes: int, max_num_seqs: int, ladder: Ladder = DENSE
) -> list[tuple[int, int, int]]:
    """What ``shape: auto`` starts from: ``(first batch, last batch, nodes)``, widest trees first.

    The form is that of vLLM's ``num_speculative_tokens_per_batch_size``. The number of nodes
    identifies a shape: it is what the scheduler tells the workers. The last range has no drafts, so
    that vLLM also captures the graphs for where speculation does not pay. vLLM only learns of
    numbers of nodes that belong to a batch of up to `max_num_seqs` requests, so ranges shrink until
    every number has such a batch. With fewer batches than numbers, those for the fewest requests
    stay: the widest ones, except of a narrow ladder, where few nodes may pay for one request, too.
    """
    rungs = ladder.within(config, num_nodes)
    wanted = [(shape.num_nodes, batch) for shape, batch in reversed(rungs)]
    wanted = [*wanted, (0, max_num_seqs)]
    few = min(len(wanted), max_num_seqs)
    wanted = _spread(wanted, few) if ladder.narrow else wanted[:few]
    ranges, first = [], 1
    for left, (nodes, batch) in zip(reversed(range(len(wanted))), wanted):
        last = max(first, min(batch, max_num_seqs - left)) if left else max_num_seqs
        ranges.append((first, last, nodes))
        first = last + 1
    return ranges


def _spread(items: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """So many of the items, as far from each other as from the ends."""
    return [items[(2 * place + 1) * len(items) // (2 * count)] for place in range(count)]
