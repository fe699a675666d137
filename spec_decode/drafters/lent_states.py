"""Blocks of states for passes that are timed, in which no request has any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables


class LentStates:
    """Stands before vLLM's block tables while the inputs of a pass of padding are prepared.

    Padding has the null block, and recurrent layers neither read nor write states there. So such a
    pass would cost less than one that serves. Here each row of padding has a block of its own. None
    of these is in use before the engine serves, and whoever gets one later begins anew, as with
    every block that another request has left. K/V are not concerned: padding has no slots.

    Args:
        tables: vLLM's.
        kv_cache_config: says which groups are of recurrent layers, and how many blocks there are.
    """

    def __init__(self, tables: BlockTables, kv_cache_config: KVCacheConfig) -> None:
        self._tables = tables
        self._blocks = kv_cache_config.num_blocks
        self._groups = [
            index
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            # Only groups of recurrent layers have it.
            if hasattr(group.kv_cache_spec, "mamba_cache_mode")
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tables, name)

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """Block tables of `num_reqs` requests per group, int32 ``[num_reqs, max_blocks]``.

        Groups of attention have the null block, 0. With fewer blocks than requests have rows, the
        blocks take turns.
        """
        found: tuple[torch.Tensor, ...] = self._tables.get_dummy_block_tables(num_reqs)
        for group in self._groups:
            table = found[group]
            numbers = torch.arange(table.numel(), dtype=table.dtype, device=table.device)
            table.copy_((numbers % (self._blocks - 1) + 1).view_as(table))
        return found
