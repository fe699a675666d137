"""Which trees a drafter grows for which batches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_graft.spec_decode.drafters.base import Growth
    from vllm_graft.spec_decode.trees.shape import TreeShape


@dataclass(frozen=True)
class TreePlan:
    """How trees with one number of nodes are drafted.

    Attributes:
        shape: bounds of the trees.
        batches: numbers of requests for which they are drafted.
        growth: what grows them; plans of the same width and depth share it.
        narrow: whether they are drafted from the head's learned vocabulary.
    """

    shape: TreeShape
    batches: Collection[int]
    growth: Growth
    narrow: bool = False

    @property
    def runner_name(self) -> str:
        """The speculator's attribute that holds the plan's graph runner."""
        kind = "narrow_tree" if self.narrow else "tree"
        return f"{kind}_{self.shape.num_nodes}_cudagraph_manager"
