"""The interface between tree verification and a family of target models.

A family claims layers, puts tree attention over them, and keeps their caches in step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_graft.spec_decode.verification.context import TreeContext, VerifyStep


class TargetState(Protocol):
    """What the layers of one family cache, before and after a pass over trees.

    Attributes:
        reads_rows: whether a pass without drafts reads the context's `rows`, too, with one token
            per request.
    """

    reads_rows: bool = True

    def fork(self, step: VerifyStep) -> None:
        """Before the pass: make room for what differs between branches; by default nothing."""
        return

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """After verification: leave what a chain of the accepted tokens would have left.

        `path` is int32 ``[max_reqs, num_nodes + 1]``, accepted nodes of each request of the batch;
        the step's ``num_sampled`` says how many of them count.
        """
        ...


class TargetFamily(Protocol):
    """How trees are verified on one kind of attention layer."""

    def claims(self, layer: Any) -> bool:
        """Whether a layer, one of vLLM's ``AttentionLayerBase``, is of this family's kind."""
        ...

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Make the layer `name` serve tree rows besides what it does already.

        The levels of the draft's layers (`is_draft`) read a scratch of K/V.

        Raises:
            ConfigError: if the layer's backend or cache is one that can't be read.
        """
        ...

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> TargetState:
        """Make the state of the target's layers of this family, whose ``kv_cache`` is bound."""
        ...
