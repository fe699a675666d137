"""Scratch memory for the K/V, or the latents, of a tree that grows by levels."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_graft.spec_decode.trees.shape import TreeShape


class LevelMemory:
    """Scratch memory that the trees of all shapes share, the largest of which decides its size.

    Each tree writes before it reads, and one tree is grown at a time, on one stream. Of the draft's
    attention layers those with ``kv_lora_rank`` have MLA. Those with
    ``kv_sharing_target_layer_name`` keep nothing of a tree, as they read K/V of another layer.
    `extra` is the columns of the tables of candidates that are for other sources than the draft.
    """

    def __init__(
        self,
        shapes: Collection[TreeShape],
        layers: Mapping[str, Any],
        *,
        max_reqs: int,
        dtype: torch.dtype,
        device: torch.device,
        extra: int = 0,
    ) -> None:
        most = max(shape.steps * shape.topk for shape in shapes)
        self._heads = {name: _heads(layer) for name, layer in layers.items()}
        self._readers = {
            name
            for name, layer in layers.items()
            if getattr(layer, "kv_sharing_target_layer_name", None)
        }
        self.max_reqs, self.dtype, self.device, self.extra = max_reqs, dtype, device, extra
        self._scratch = {
            name: torch.zeros(
                0 if name in self._readers else max_reqs * most * heads * size,
                dtype=dtype,
                device=device,
            )
            for name, (heads, size) in self._heads.items()
        }

    def scratch(self, shape: TreeShape) -> dict[str, torch.Tensor]:
        """K/V of one shape's trees by draft layer, ``[max_reqs, steps * topk, heads, 2 * size]``.

        A layer with MLA has ``[max_reqs, steps * topk, 1, rank + rope]``, one that reads another
        layer's K/V no slots.
        """
        return {name: self._slots(name, flat, shape) for name, flat in self._scratch.items()}

    def _slots(self, name: str, flat: torch.Tensor, shape: TreeShape) -> torch.Tensor:
        slots = 0 if name in self._readers else shape.steps * shape.topk
        used = flat[: self.max_reqs * slots * math.prod(self._heads[name])]
        return used.view(self.max_reqs, slots, *self._heads[name])

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self._scratch.values())


def _heads(layer: Any) -> tuple[int, int]:
    """How many heads a layer keeps of a token, and numbers of each."""
    if getattr(layer, "kv_lora_rank", None):
        return 1, layer.head_size  # A latent and its rotated part.
    return layer.num_kv_heads, 2 * layer.head_size
