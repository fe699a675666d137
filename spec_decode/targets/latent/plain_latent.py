"""Attention over latents in plain torch: a reference for the kernel, and what a CPU runs."""

import torch

from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.plain_attention import (
    attended,
    cached,
    own_rows,
    seen_keys,
)
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch


def latent_attention_reference(
    batch: LatentBatch | LatentDraftBatch,
    out: torch.Tensor,
    *,
    workspace: AttentionWorkspace | None = None,
) -> None:
    """The kernel's ``latent_attention`` in float32; it reads lengths on the host."""
    if isinstance(batch, LatentDraftBatch):
        _attend_frontier(batch, out)
        return
    for r, own in own_rows(batch):
        if own.start == own.stop:
            continue
        keys = gathered_latents(batch, r, int(batch.prefix_lens[r]) + own.stop - own.start)
        out[own] = _attended(batch, own, keys, seen_keys(batch, own, len(keys))).to(out.dtype)


def _attend_frontier(batch: LatentDraftBatch, out: torch.Tensor) -> None:
    topk, slots = batch.topk, (batch.level + 1) * batch.topk
    for r, prefix in enumerate(batch.prefix_lens[: batch.num_reqs].tolist()):
        own = slice(r * topk, (r + 1) * topk)
        keys = torch.cat([gathered_latents(batch, r, prefix), batch.scratch[r, :slots, 0].float()])
        visible = torch.zeros(topk, len(keys), dtype=torch.bool, device=keys.device)
        visible[:, :prefix] = True
        visible.scatter_(1, prefix + batch.ancestors[r, :, : batch.level + 1].long(), True)
        out[own] = _attended(batch, own, keys, visible).to(out.dtype)


def copy_tree_rows_reference(
    source: torch.Tensor, target: torch.Tensor, batch: LatentBatch
) -> None:
    """The kernel's ``copy_tree_rows``."""
    for _, own in own_rows(batch):
        target[own] = source[own]


def _attended(
    batch: LatentBatch | LatentDraftBatch, own: slice, keys: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Weighted latents of some rows of the query, f32 ``[rows, num_heads, rank]``."""
    both = torch.cat([batch.query[own], batch.query_rope[own]], dim=-1).float()
    key = keys[:, None]
    return attended(both, key, key[..., : batch.query.shape[2]], visible, batch.scale)


def gathered_latents(
    batch: LatentBatch | LatentDraftBatch, request: int, length: int
) -> torch.Tensor:
    """The keys of a request, f32 ``[length, rank + rope]``."""
    keys, fp8 = cached(batch.latents.unsqueeze(1), batch.block_table[request], length)
    return (keys * batch.k_scale if fp8 and batch.k_scale is not None else keys)[:, 0]
