"""Which trees an engine drafts: their shapes, and the batches that each is drafted for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_graft.spec_decode.tuning.scheduling import batches_by_nodes
from vllm_graft.spec_decode.tuning.shapes import TreeShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.config import EagleConfig
    from vllm_graft.spec_decode.drafters.levels import DraftLevels
    from vllm_graft.spec_decode.tuning.shapes import TreePolicy


@dataclass(frozen=True)
class TreePlan:
    """Trees of one number of nodes.

    Attributes:
        shape: their bounds.
        batches: numbers of requests for which they are drafted.
        levels: what grows them; shared by plans of the same width and depth.
        narrow: whether their levels draft from the head's learned vocabulary.
    """

    shape: TreeShape
    batches: Collection[int]
    levels: DraftLevels
    narrow: bool = False

    @property
    def runner_name(self) -> str:
        """The proposer's attribute that holds the plan's graph runner."""
        kind = "narrow_tree" if self.narrow else "tree"
        return f"{kind}_{self.shape.num_nodes}_cudagraph_manager"


def plan_shapes(
    policy: TreePolicy, config: EagleConfig, vllm_config: VllmConfig
) -> dict[TreeShape, list[int]]:
    """The shape of each number of nodes that the scheduler may ask for, and for which batches.

    The largest number is always there: dummy runs and batches of another kind draft it.
    """
    speculative = vllm_config.speculative_config
    assert speculative is not None
    batches = batches_by_nodes(vllm_config, auto=config.tree == "auto")
    batches.setdefault(speculative.num_speculative_tokens, [])
    return {policy(config, nodes): served for nodes, served in batches.items() if nodes}


def widths(vllm_config: VllmConfig, *, auto: bool) -> set[int]:
    """Rows a request, root and nodes, that a pass of the target may verify."""
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
