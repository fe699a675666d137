"""Any target, for trees that are chains (``topk: 1``): its own attention verifies them.

Rows of a chain are in the order of their positions, and each sees the rows before it. So the
engine's kernels, states and caches are right as they are, whatever the layer computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_graft.spec_decode.verification.context import TreeContext, VerifyStep


class UnchangedState:
    """What vLLM itself keeps in step with the accepted tokens of a chain."""

    def fork(self, step: VerifyStep) -> None:
        """Do nothing: a chain has no branches."""

    def commit(self, path: torch.Tensor, step: VerifyStep) -> None:
        """Do nothing: the accepted rows are the first ones."""


class UnchangedFamily:
    """Layers of every kind, which stay as they are."""

    def claims(self, layer: Any) -> bool:
        return True

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        """Leave the layer alone."""

    def state(
        self,
        layers: Mapping[str, Any],
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
    ) -> UnchangedState:
        """A state that does nothing."""
        return UnchangedState()
