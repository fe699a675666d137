"""Multi-head latent attention (MLA): DeepSeek V2, V3 and R1, Kimi K2, Kimi Linear, LongCat, ..."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.attention import MLAAttention

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.permission import require_seams
from vllm_graft.spec_decode.targets.dense.dense_family import DenseState
from vllm_graft.spec_decode.targets.dense.window import refuse_window
from vllm_graft.spec_decode.targets.latent.latent_layer import (
    graft_kimi_latents,
    graft_latents,
    is_latent,
)

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.block_table import BlockTables

    from vllm_graft.spec_decode.verification.context import TreeContext


class LatentFamily:
    """Layers that cache one latent per token, which moves as K/V of plain attention do."""

    _checked = False

    def claims(self, layer: Any) -> bool:
        return is_latent(layer)

    def attach(self, name: str, layer: Any, context: TreeContext, *, is_draft: bool) -> None:
        if is_draft and context.draft_window:
            refuse_window(name, "has MLA")
        if isinstance(layer, MLAAttention):
            graft_latents(name, layer, context, is_draft=is_draft)
            return
        if not self._checked:
            require_seams("kimi")
            self._checked = True
        graft_kimi_latents(name, layer, context, is_draft=is_draft)

    def state(
        self, layers: Mapping[str, Any], kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> DenseState:
        caches = {name: _latents(name, layer.kv_cache) for name, layer in layers.items()}
        return DenseState.of(caches, kv_cache_config, block_tables)


def _latents(name: str, cache: torch.Tensor) -> torch.Tensor:
    """A layer's latents as K/V of one head, ``[blocks, 1, block_size, rank + rope]``."""
    if cache.dim() != 3:
        raise SeamError(
            f"vLLM bound the latents of {name} as {list(cache.shape)}, and vllm-graft reads them "
            "as [blocks, block_size, rank + rope]: remove the keys of "
            "--additional-config.graft.tree, and report this with vLLM's version"
        )
    return cache.unsqueeze(1)
