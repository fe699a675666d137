"""Shapes of trees that an engine drafts, and their batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.tuning.scheduling import batches_by_nodes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.spec_decode.config.tree_config import TreeConfig
    from vllm_graft.spec_decode.tuning.shapes import TreePolicy


def plan_shapes(
    policy: TreePolicy, config: TreeConfig, vllm_config: VllmConfig
) -> dict[TreeShape, list[int]]:
    """The shape for each number of nodes that the scheduler may ask for, and its batches.

    The largest number of nodes is always there: steps for which the scheduler asks for none in
    particular, such as dummy runs, draft it.

    Returns:
        Numbers of requests for which trees of a shape are drafted, by shape.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    batches = batches_by_nodes(vllm_config, auto=config.shape == "auto")
    batches.setdefault(speculative.num_speculative_tokens, [])
    return {policy(config, nodes): counts for nodes, counts in batches.items() if nodes}


def widths(vllm_config: VllmConfig, *, auto: bool) -> set[int]:
    """Rows per request, root and nodes, that a pass of the target may verify."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    nodes = {*batches_by_nodes(vllm_config, auto=auto), speculative.num_speculative_tokens}
    return {count + 1 for count in nodes}


def bounds(shapes: Collection[TreeShape]) -> TreeShape:
    """The smallest shape that holds all of `shapes`."""
    return TreeShape(
        max(shape.topk for shape in shapes),
        max(shape.steps for shape in shapes),
        max(shape.num_nodes for shape in shapes),
    )
