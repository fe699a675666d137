"""The first of two passes (`Passes`) in float32; NaN where there is no prefix.

They read lengths on the host.
"""

import torch

from vllm_graft.spec_decode.targets.dense.plain_attention import _float_query, _logits, gathered
from vllm_graft.spec_decode.targets.latent import plain_latent
from vllm_graft.spec_decode.trees.batch import LatentBatch, TreeBatch


def prefix_attention_reference(
    batch: TreeBatch, *, multiprocessors: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to K and V of heads."""
    query = _float_query(batch)
    out = torch.full(query.shape, float("nan"), device=query.device)
    lse = torch.full(query.shape[1::-1], float("nan"), device=query.device)
    starts = batch.query_start_loc.tolist()
    for r, length in enumerate(batch.prefix_lens.tolist()):
        own = slice(starts[r], starts[r + 1])
        if length == 0 or own.start == own.stop:
            continue
        key, value = gathered(
            batch.kv_cache, batch.block_table[r], length, batch.k_scale, batch.v_scale
        )
        logits = _logits(query[own], key, batch.scale, batch.soft_cap)
        lse[:, own] = logits.logsumexp(-1).flatten(0, 1)
        mixed = torch.einsum("hgrn,nhd->rhgd", logits.softmax(-1), value)
        out[own] = mixed.reshape(out[own].shape)
    return out, lse


def prefix_latents_reference(
    batch: LatentBatch, *, multiprocessors: int, plan: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full(batch.query.shape, float("nan"), device=batch.query.device)
    lse = torch.full(batch.query.shape[1::-1], float("nan"), device=batch.query.device)
    starts = batch.query_start_loc.tolist()
    for r, length in enumerate(batch.prefix_lens.tolist()):
        own = slice(starts[r], starts[r + 1])
        if length == 0:
            continue
        keys = plain_latent.gathered_latents(batch, r, length)
        both = torch.cat([batch.query[own], batch.query_rope[own]], dim=-1).float()
        logits = torch.einsum("rhd,nd->hrn", both, keys) * batch.scale
        lse[:, own] = logits.logsumexp(-1)
        latents = keys[:, : batch.query.shape[2]]
        out[own] = torch.einsum("hrn,nd->rhd", logits.softmax(-1), latents)
    return out, lse
