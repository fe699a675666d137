"""Shapes of trees that an engine drafts, and their batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm_graft.base.errors import HookError
from vllm_graft.base.options import flag
from vllm_graft.base.values import shown
from vllm_graft.spec_decode.trees.tree import TreeShape
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

    Raises:
        HookError: if the policy returns no tree of the number of nodes that it was asked for.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    batches = batches_by_nodes(vllm_config, auto=config.shape == "auto")
    batches.setdefault(speculative.num_speculative_tokens, [])
    return {_asked(policy, config, nodes): counts for nodes, counts in batches.items() if nodes}


def _asked(policy: TreePolicy, config: TreeConfig, nodes: int) -> TreeShape:
    """The policy's shape; the engine verifies exactly so many nodes, and drafts one at least."""
    shape = policy(config, nodes)
    if (
        not isinstance(shape, TreeShape)
        or shape.num_nodes != nodes
        or min(shape.topk, shape.steps) < 1
    ):
        raise HookError(
            f"{flag('tree', 'policy')} {config.policy!r} returned {shown(shape)} for {nodes} nodes "
            f"(topk {config.topk}, steps {config.steps}), but must return a TreeShape of exactly "
            f"{nodes} nodes, with topk and steps of at least 1: mend the policy, or drop the key"
        )
    return shape


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
