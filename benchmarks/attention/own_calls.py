"""Calls of our kernels, as an engine's graph holds them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from benchmarks.attention.shapes import DTYPE
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.targets.dense.two_pass import PLAIN_PASSES, KernelChoice, TwoPass
from vllm_graft.spec_decode.targets.latent.latent_attention import latent_attention
from vllm_graft.spec_decode.targets.latent.latent_two_pass import LATENT_PASSES
from vllm_graft.spec_decode.trees.batch import LatentBatch, TreeBatch

Calls = list[Callable[[], torch.Tensor]]
"""A call per batch; it returns ``[num_reqs * rows, num_heads, size]``."""


def triton(batches: Sequence[TreeBatch], space: AttentionWorkspace, longest: int) -> Calls:
    """The Triton kernel over keys and values; beside an e4m3 query the output is bfloat16."""
    query = batches[0].query
    dtype = DTYPE if query.dtype == torch.float8_e4m3fn else query.dtype
    out = torch.empty(query.shape, dtype=dtype, device=query.device)

    def call(batch: TreeBatch) -> torch.Tensor:
        tree_attention(batch, out, workspace=space)
        return out

    return [functools.partial(call, replace(batch, max_seq_len=longest)) for batch in batches]


def two_pass(
    batches: Sequence[TreeBatch] | Sequence[LatentBatch], space: AttentionWorkspace, longest: int
) -> Calls:
    """FlashAttention 3 over the prefix, then the trees' own rows; one plan for a graph."""
    query = batches[0].query
    latent = isinstance(batches[0], LatentBatch)
    # Over latents, the second pass completes the first one's output.
    out = None if latent else torch.empty(query.shape, dtype=query.dtype, device=query.device)
    passes = LATENT_PASSES if latent else PLAIN_PASSES
    both, metadata = TwoPass(KernelChoice("flash"), passes), object()

    def call(batch: TreeBatch | LatentBatch) -> torch.Tensor:
        return both.attend(batch, out, metadata, multiprocessors=space.multiprocessors)

    return [functools.partial(call, replace(batch, max_seq_len=longest)) for batch in batches]


def latents(batches: Sequence[LatentBatch], space: AttentionWorkspace, longest: int) -> Calls:
    """The kernel over latents, and the zeros that a layer fills its output with before."""

    def call(batch: LatentBatch) -> torch.Tensor:
        out = torch.zeros_like(batch.query)
        latent_attention(batch, out, workspace=space)
        return out

    return [functools.partial(call, replace(batch, max_seq_len=longest)) for batch in batches]
