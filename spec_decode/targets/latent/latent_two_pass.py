"""Tree attention over latents (MLA) in two passes: FlashAttention 3 over the prefix, then the tree.
In the absorbed form all heads of a request's rows share their keys, so arithmetic bounds attention
over a long context, where FlashAttention 3 is several times as fast as our Triton kernel. Its keys
are the rotated parts, its values the latents, which meet queries of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch

from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.kernel_launch import cdiv
from vllm_graft.spec_decode.targets.dense.two_pass import (
    KernelChoice,
    KernelName,
    Passes,
    Point,
    TwoPass,
    attended_prefix,
    bounded_splits,
    random_trees,
    scheduled,
)
from vllm_graft.spec_decode.targets.latent.latent_attention import latent_attention
from vllm_graft.spec_decode.targets.latent.own_latents import attend_own_latents
from vllm_graft.spec_decode.trees.batch import LatentBatch

_TILE = 64
"""Query rows of a program of FlashAttention 3 with values of 512 numbers, times heads."""

_RANK, _ROPE = 512, 64
"""What FlashAttention 3 is built for: numbers of a latent, and of its rotated part."""


def latent_splits(batch: LatentBatch, multiprocessors: int) -> int:
    """See `bounded_splits`."""
    num_tokens, num_heads, rank = batch.query.shape
    programs = cdiv(batch.max_rows * num_heads, _TILE)
    return bounded_splits(num_tokens * num_heads, rank, programs, multiprocessors)


def plan_latent_prefix(batch: LatentBatch, *, multiprocessors: int) -> torch.Tensor:
    """`scheduled` for latents."""
    return scheduled(
        batch,
        num_heads_kv=1,
        headdim=batch.query_rope.shape[2],
        headdim_v=batch.query.shape[2],
        page_size=batch.latents.shape[1],
        num_splits=latent_splits(batch, multiprocessors),
    )


def flash_prefix_latents(
    batch: LatentBatch, *, multiprocessors: int, plan: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the latents before each tree; `plan` is `plan_latent_prefix` of the same batch."""
    rank = batch.query.shape[2]
    return attended_prefix(
        batch,
        plan,
        q=batch.query_rope,
        k=batch.latents[..., rank:].unsqueeze(-2),
        v=batch.latents[..., :rank].unsqueeze(-2),
        q_v=batch.query,
        num_splits=latent_splits(batch, multiprocessors),
    )


LATENT_PASSES = Passes(plan_latent_prefix, flash_prefix_latents, attend_own_latents)
"""Both passes over latents."""


def why_no_latent_passes(layer: Any) -> str | None:
    """Why a layer's trees can't be attended in two passes; None if they can."""
    from vllm import envs
    from vllm.v1.attention.backends.fa_utils import flash_attn_supports_mla
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    known: Any = flash_attn_supports_mla()
    if not known:
        return "this device has no FlashAttention 3 for latents"
    if (layer.kv_lora_rank, layer.qk_rope_head_dim) != (_RANK, _ROPE):
        return (
            f"FlashAttention 3 takes latents of {_RANK} and {_ROPE} numbers, and the layer has "
            f"{layer.kv_lora_rank} and {layer.qk_rope_head_dim}"
        )
    if is_quantized_kv_cache(layer.kv_cache_dtype):
        return f"FlashAttention 3 takes no latents in {layer.kv_cache_dtype}"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT is set, and splits depend on the batch"
    return None


class LatentGeometry(NamedTuple):
    """What attention's time depends on besides the batch, of one rank."""

    num_heads: int
    rank: int
    rope: int
    dtype: torch.dtype
    block_size: int

    @property
    def most_keys(self) -> int:
        """Keys of all requests above which a point is left out: 128 heads take long over more."""
        return 1 << 18

    @property
    def calls_timed(self) -> int:
        """Calls in a graph that is timed."""
        return 2

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype, block_size: int) -> Self:
        sizes = (len(layer.W_UK_T), layer.kv_lora_rank, layer.qk_rope_head_dim)
        return cls(*sizes, dtype, block_size)

    def problem(self, point: Point, device: torch.device | str) -> LatentBatch:
        """A batch of random trees, all with ``point.rows`` rows."""
        rows, width = point.num_reqs * point.rows, self.rank + self.rope
        block_bytes = self.block_size * width * self.dtype.itemsize
        blocks, trees = random_trees(point, self.block_size, block_bytes, device)

        def drawn(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device=device, dtype=self.dtype)

        return LatentBatch(
            query=drawn(rows, self.num_heads, self.rank),
            query_rope=drawn(rows, self.num_heads, self.rope),
            latents=drawn(blocks, self.block_size, width),
            scale=width**-0.5,
            **trees,
        )

    def lengthen(self, batch: LatentBatch, keys: int) -> None:
        """Give each request so many keys, its tree's among them."""
        batch.prefix_lens.fill_(keys - batch.max_rows)

    def calls(
        self, batch: LatentBatch, workspace: AttentionWorkspace, longest: int
    ) -> dict[KernelName, Callable[[], None]]:
        """A call of each kernel, for graphs whose requests have up to `longest` keys. The kernel
        that is the only one gets zeros to write to, as in a layer."""
        batch = replace(batch, max_seq_len=longest)
        both, metadata = TwoPass(KernelChoice("flash"), LATENT_PASSES), object()
        multiprocessors = workspace.multiprocessors

        def alone() -> None:
            latent_attention(batch, torch.zeros_like(batch.query), workspace=workspace)

        def passes() -> None:
            both.attend(batch, None, metadata, multiprocessors=multiprocessors)

        return {"triton": alone, "flash": passes}
