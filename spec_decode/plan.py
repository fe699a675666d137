"""Which trees an engine drafts: their shapes, and the batches that each is drafted for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.spec_decode.policy import TreeShape
from vllm_graft.spec_decode.scheduling import max_rows, nodes_by_batch
from vllm_graft.spec_decode.tuner import NodeTuner

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.config import EagleConfig
    from vllm_graft.spec_decode.levels import DraftLevels
    from vllm_graft.spec_decode.policy import TreePolicy


@dataclass(frozen=True)
class TreePlan:
    """Trees of one number of nodes.

    Attributes:
        shape: their bounds.
        batches: numbers of requests for which they are drafted.
        levels: what grows them; shared by plans of the same width and depth.
    """

    shape: TreeShape
    batches: Collection[int]
    levels: DraftLevels

    @property
    def runner_name(self) -> str:
        """The proposer's attribute that holds the plan's graph runner."""
        return f"tree_{self.shape.num_nodes}_cudagraph_manager"


def plan_shapes(
    policy: TreePolicy, config: EagleConfig, vllm_config: VllmConfig
) -> dict[TreeShape, list[int]]:
    """The shape of each number of nodes that the scheduler may ask for, and for which batches.

    The largest number is always there: dummy runs and batches of another kind draft it.
    """
    schedule = nodes_by_batch(vllm_config)
    speculative = vllm_config.speculative_config
    assert speculative is not None
    tuner = NodeTuner(schedule, max_rows(vllm_config))
    batches: dict[int, list[int]] = {speculative.num_speculative_tokens: []}
    for batch, scheduled in enumerate(schedule):
        numbers = tuner.allowed(batch) if config.tree == "auto" else [scheduled]
        for nodes in numbers if batch else ():
            batches.setdefault(nodes, []).append(batch)
    batches.pop(0, None)
    return {policy(config, nodes): sizes for nodes, sizes in batches.items()}


def bounds(shapes: Collection[TreeShape]) -> TreeShape:
    """The smallest shape that holds all of `shapes`."""
    return TreeShape(
        max(shape.topk for shape in shapes),
        max(shape.steps for shape in shapes),
        max(shape.num_nodes for shape in shapes),
    )
