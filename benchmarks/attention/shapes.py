"""Attention layers of known models, and the bytes that a batch of rows has to move in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_graft.spec_decode.targets.latent.latent_two_pass import LatentGeometry
from vllm_graft.spec_decode.tuning.attention_timing import Geometry

DTYPE = torch.bfloat16
ITEM: int = DTYPE.itemsize
BLOCK, LATENT_BLOCK = 16, 64
"""Slots of a block. FlashMLA takes blocks of 64 alone."""


@dataclass(frozen=True)
class KvLayer:
    """A layer whose heads have keys and values.

    Attributes:
        name: what kind of layer it is in its model.
        heads: query heads.
        kv_heads: heads of K and V.
        head_size: numbers of a head.
        window: positions that a row sees, its own among them; 0 for all.
        sinks: whether each head has a sink.
        alike: whether all layers of the model have this window. VLLM plans FlashAttention once for
            all layers then, else each layer's call makes a plan.
    """

    name: str
    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    sinks: bool = False
    alike: bool = True

    @property
    def geometry(self) -> Geometry:
        """What an engine measures both of our kernels by."""
        return Geometry(self.heads, self.kv_heads, self.head_size, DTYPE, False, BLOCK)

    @property
    def block_size(self) -> int:
        return BLOCK

    @property
    def key_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return 2 * self.kv_heads * self.head_size * ITEM

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's query and output."""
        return 2 * self.heads * self.head_size * ITEM

    @property
    def output_size(self) -> int:
        """Numbers of a head's output."""
        return self.head_size

    def keys(self, rows: int, context: int) -> int:
        """Keys of a request that any of the last `rows` rows sees, were they a chain."""
        return min(context, self.window + rows - 1) if self.window else context


@dataclass(frozen=True)
class LatentLayer:
    """A layer with multi-head latent attention (arXiv:2405.04434), in its absorbed form.

    Attributes:
        name: what kind of layer it is in its model.
        heads: query heads, which share the latents.
        rank: numbers of a latent.
        rope: numbers of its rotated part.
    """

    name: str
    heads: int
    rank: int = 512
    rope: int = 64
    window: int = 0

    @property
    def geometry(self) -> LatentGeometry:
        """What an engine measures both of our kernels by."""
        return LatentGeometry(self.heads, self.rank, self.rope, DTYPE, LATENT_BLOCK)

    @property
    def block_size(self) -> int:
        return LATENT_BLOCK

    @property
    def key_bytes(self) -> int:
        """Bytes of a token in the cache."""
        return (self.rank + self.rope) * ITEM

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's query and output."""
        return self.heads * (2 * self.rank + self.rope) * ITEM

    @property
    def output_size(self) -> int:
        """Numbers of a head's output."""
        return self.rank

    def keys(self, rows: int, context: int) -> int:
        """Keys of a request that any of the last `rows` rows sees."""
        return context


Layer = KvLayer | LatentLayer

SHAPES: dict[str, tuple[Layer, ...]] = {
    "llama-8b": (KvLayer("full", 32, 8, 128),),
    "gpt-oss": (
        KvLayer("full", 64, 8, 64, sinks=True, alike=False),
        KvLayer("window 128", 64, 8, 64, window=128, sinks=True, alike=False),
    ),
    "gemma-3": (
        KvLayer("full", 8, 4, 256, alike=False),
        KvLayer("window 1024", 8, 4, 256, window=1024, alike=False),
    ),
    "deepseek-v2-lite": (LatentLayer("latents", 16),),
    "deepseek-v3": (LatentLayer("latents", 128),),
}
"""Layers of each model, a layer of each kind. gemma-3 is the one of 4B."""


def moved_bytes(layer: Layer, batch: int, rows: int, context: int) -> int:
    """Bytes that any kernel has to read or write: keys once per request, queries and outputs."""
    return batch * (layer.keys(rows, context) * layer.key_bytes + rows * layer.row_bytes)
