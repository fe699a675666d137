"""Attention over latents in plain torch: a reference for the kernel, and what a CPU runs."""

from __future__ import annotations

import torch

from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch


def latent_attention_reference(
    batch: LatentBatch, out: torch.Tensor, *, workspace: AttentionWorkspace | None = None
) -> None:
    """The kernel's ``latent_attention`` in float32; it reads lengths on the host."""
    for r, own in enumerate(_own_rows(batch)):
        rows = own.stop - own.start
        if rows == 0:
            continue
        prefix = int(batch.prefix_lens[r])
        keys = _gather(batch, r, prefix + rows)
        visible = torch.ones(rows, len(keys), dtype=torch.bool, device=keys.device)
        bits = torch.arange(rows, device=keys.device)
        visible[:, prefix:] = (batch.row_masks[own, None] >> bits & 1).bool()
        out[own] = _attend(batch, own, keys, visible).to(out.dtype)


def latent_draft_attention_reference(
    batch: LatentDraftBatch, out: torch.Tensor, *, workspace: AttentionWorkspace | None = None
) -> None:
    """The kernel's ``latent_draft_attention`` in float32."""
    topk, slots = batch.topk, (batch.level + 1) * batch.topk
    for r, prefix in enumerate(batch.prefix_lens[: batch.num_reqs].tolist()):
        own = slice(r * topk, (r + 1) * topk)
        keys = torch.cat([_gather(batch, r, prefix), batch.scratch[r, :slots, 0].float()])
        visible = torch.zeros(topk, len(keys), dtype=torch.bool, device=keys.device)
        visible[:, :prefix] = True
        visible.scatter_(1, prefix + batch.ancestors[r, :, : batch.level + 1].long(), True)
        out[own] = _attend(batch, own, keys, visible).to(out.dtype)


def copy_tree_rows_reference(
    source: torch.Tensor, target: torch.Tensor, batch: LatentBatch
) -> None:
    """The kernel's ``copy_tree_rows``."""
    for own in _own_rows(batch):
        target[own] = source[own]


def _own_rows(batch: LatentBatch) -> list[slice]:
    """The rows of each request's tree."""
    starts = batch.query_start_loc.tolist()
    found = []
    for r, rows in enumerate(batch.num_rows[: batch.num_reqs].tolist()):
        end = starts[r + 1]
        found.append(slice(end - min(rows, batch.max_rows, end - starts[r]), end))
    return found


def _attend(
    batch: LatentBatch | LatentDraftBatch, own: slice, keys: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Weighted latents of some rows of the query, f32 ``[rows, num_heads, rank]``."""
    both = torch.cat([batch.query[own], batch.query_rope[own]], dim=-1).float()
    logits = torch.einsum("rhd,nd->hrn", both, keys) * batch.scale
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
    return torch.einsum("hrn,nd->rhd", weights, keys[:, : batch.query.shape[2]])


def _gather(batch: LatentBatch | LatentDraftBatch, request: int, length: int) -> torch.Tensor:
    """The keys of a request, f32 ``[length, rank + rope]``."""
    position = torch.arange(length, device=batch.latents.device)
    size = batch.latents.shape[1]
    blocks = batch.block_table[request, position // size].long()
    keys = batch.latents[blocks, position % size]
    fp8 = keys.dtype in (torch.uint8, torch.float8_e4m3fn)
    keys = keys.view(torch.float8_e4m3fn).float() if fp8 else keys.float()
    return keys * batch.k_scale if fp8 and batch.k_scale is not None else keys
