"""What verifying a tree asks of a family of target models.

A family claims layers, puts tree attention (or what stands for it) over them, and keeps whatever
its layers cache in step with the accepted path. Which features of a model it serves stands in its
entry of the hook ``graft_target_families``; see `features`.
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
    """What the layers of one family cache, across one pass over trees."""

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
    """Layers that are served alike."""

    def claims(self, layer: Any) -> bool:
        """Whether a layer, one of vLLM's ``AttentionLayerBase``, is of this family's kind."""
        ...

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Make a layer serve tree rows besides what it does already.

        Args:
            name: of the layer in vLLM's forward context.
            layer: which the family claims.
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
        """The state of the target's layers of this family, when vLLM has allocated its cache.

        Args:
            layers: those layers by name, their ``kv_cache`` bound.
            kv_cache_config: groups of layers.
            block_tables: slots of each group.
        """
        ...
