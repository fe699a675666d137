"""The interface between tree verification and a family of target models.

A family claims layers, puts tree attention (or its equivalent) over them, and keeps what its layers
cache in step with the accepted path. Its entry of the hook ``graft_target_families`` lists the
features of models that it serves; see `features`.
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
    """What the layers of one family cache, before and after a pass over trees."""

    def fork(self, step: VerifyStep) -> None:
        """Before the pass: make room for what differs between branches.

        K/V needs nothing, as every node has a slot of its own. A recurrent state needs a copy per
        node.
        """
        ...

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """After verification: leave what a chain of the accepted tokens would have left.

        Args:
            path: int32 ``[max_reqs, num_nodes + 1]``, accepted nodes of each request of the batch.
            step: the pass; its ``num_sampled`` says how many of them count.
        """
        ...


class TargetFamily(Protocol):
    """How trees are verified on one kind of attention layer."""

    def claims(self, layer: Any) -> bool:
        """Whether a layer, one of vLLM's ``AttentionLayerBase``, is of this family's kind."""
        ...

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Make a layer serve tree rows besides what it does already.

        Args:
            name: the layer's name in vLLM's forward context.
            layer: a layer that the family claims.
            context: what the tree parts of the worker share.
            is_draft: whether the layer is the draft model's, whose levels read a scratch of K/V.

        Raises:
            ConfigError: if the layer's backend or cache is one that can't be read.
        """
        ...

    def state(
        self,
        layers: Mapping[str, Any],
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
    ) -> TargetState:
        """Make the state of the target's layers of this family, once vLLM's cache is allocated.

        Args:
            layers: these layers by name, with their ``kv_cache`` bound.
            kv_cache_config: the groups of layers.
            block_tables: the slots of each group.
        """
        ...
