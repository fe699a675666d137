"""Attention of a draft's levels over latents equals a plain computation in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.samples.attention_samples import TOLERANCE, untouched
from tests.support.samples.attention_spaces import nan_space
from tests.support.samples.latent_samples import LatentShape, latent_draft_problem
from vllm_graft.spec_decode.kernels.attention.tree_attention import write_scratch
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.plain_attention import write_scratch_reference
from vllm_graft.spec_decode.targets.latent.latent_attention import latent_draft_attention
from vllm_graft.spec_decode.targets.latent.plain_latent import latent_draft_attention_reference
from vllm_graft.spec_decode.trees.batch import LatentDraftBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def row_by_row(batch: LatentDraftBatch) -> torch.Tensor:
    """The reference of the reference: each head of each row over a list of its keys."""
    out = torch.empty(batch.query.shape)
    rank, size = batch.query.shape[2], batch.latents.shape[1]
    for row in range(batch.num_reqs * batch.topk):
        r, node = divmod(row, batch.topk)
        keys = [
            batch.latents[int(batch.block_table[r, i // size]), i % size].float()
            for i in range(int(batch.prefix_lens[r]))
        ]
        slots = batch.ancestors[r, node, : batch.level + 1].tolist()
        keys += [batch.scratch[r, slot, 0] for slot in slots]
        for head in range(batch.query.shape[1]):
            query = torch.cat([batch.query[row, head], batch.query_rope[row, head]])
            logits = torch.stack([query @ key for key in keys]) * batch.scale
            weights = logits.softmax(0)
            out[row, head] = sum(w * key[:rank] for w, key in zip(weights, keys))
    return out


def outputs(
    batch: LatentDraftBatch, space: AttentionWorkspace | None = None, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ours, expected = untouched(batch.query), untouched(batch.query)
    latent_draft_attention(batch, ours, workspace=space, num_splits=num_splits)
    latent_draft_attention_reference(batch, expected)
    return ours, expected


def error(
    batch: LatentDraftBatch, space: AttentionWorkspace | None = None, num_splits: int | None = None
) -> float:
    ours, expected = outputs(batch, space, num_splits)
    assert expected.isfinite().all()
    return float((ours.float() - expected.float()).abs().max())


FLOAT32 = [
    (LatentShape(rows=(), prefixes=(0,), heads=1), 1, 1, 0),
    (LatentShape(rows=(), prefixes=(35, 0, 1), heads=16), 4, 3, 2),
    (LatentShape(rows=(), prefixes=(3, 136), heads=2, rank=48, rope=8), 8, 4, 1),
    (LatentShape(rows=(), prefixes=(6,), heads=5, block_size=64), 10, 6, 5),
    (LatentShape(rows=(), prefixes=(40, 21), heads=2, rank=512, rope=64, block_size=64), 3, 2, 1),
]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("shape", "topk", "steps", "level"), FLOAT32, ids=str)
def test_equals_reference(
    shape: LatentShape, topk: int, steps: int, level: int, splits: int
) -> None:
    batch = latent_draft_problem(shape, topk, steps, level, DEVICE)
    space = nan_space(batch, 12) if splits > 1 else None
    assert error(batch, space, splits) < TOLERANCE[torch.float32]


def test_the_reference_is_attention_over_the_prefix_and_the_ancestors() -> None:
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(19, 0)), 3, 4, 2)
    found = untouched(batch.query)
    latent_draft_attention_reference(batch, found)
    torch.testing.assert_close(found, row_by_row(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, fp8: bool) -> None:
    shape = LatentShape(rows=(), prefixes=(114, 2), rank=64, rope=32, dtype=dtype, fp8=fp8, heads=4)
    batch = latent_draft_problem(shape, 4, 3, 2, DEVICE)
    assert error(batch, nan_space(batch, 4)) < TOLERANCE[dtype]
    if fp8:
        batch = replace(batch, latents=batch.latents.view(torch.uint8))
        assert error(batch) < TOLERANCE[dtype]
        # Negative control: the scale counts, and the scratch has none.
        unscaled, scaled = outputs(replace(batch, k_scale=None))[0], outputs(batch)[0]
        assert float((unscaled.float() - scaled.float()).abs().max()) > 0.1


def test_padding_sees_its_own_scratch_alone() -> None:
    """A request without a prefix; its first level is its own latent."""
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(0, 7)), 2, 2, 0, DEVICE)
    out = untouched(batch.query)
    latent_draft_attention(batch, out)
    own = batch.scratch[0, :2, :, : batch.query.shape[2]].expand(-1, batch.query.shape[1], -1)
    torch.testing.assert_close(out[:2], own, atol=1e-6, rtol=0)


def test_other_ancestors_and_prefixes_give_other_rows() -> None:
    """Negative controls: ancestors ignored, and a prefix that is off by one."""
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(20, 9)), 3, 3, 2, DEVICE)
    found = outputs(batch)[0]
    siblings = batch.ancestors.clone()
    siblings[:, :, :2] = batch.ancestors[:, :, :2] // 3 * 3 + (batch.ancestors[:, :, :2] + 1) % 3
    assert (outputs(replace(batch, ancestors=siblings))[0] - found).abs().max() > 0.1
    short = replace(batch, prefix_lens=batch.prefix_lens - 1)
    assert (outputs(short)[0] - found).abs().max() > 0.01


@pytest.mark.parametrize("sizes", [(512, 64), (48, 16), (32, 8)])
def test_latents_of_a_level_go_to_its_slots(sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 1, sum(sizes) + 4, generator=generator).to(DEVICE)
    latent, rotated = wide[..., : sizes[0]], wide[..., -sizes[1] :]
    ours = torch.full((3, 8, 1, sum(sizes)), 7.0, device=DEVICE)
    expected = ours.clone()
    for level in (1, 3):
        write_scratch(latent, rotated, ours, level, num_reqs=3, topk=2)
        write_scratch_reference(latent, rotated, expected, level, 3, 2)
    assert torch.equal(ours, expected)
    assert torch.equal(ours[1, 3, 0, : sizes[0]], latent[3, 0])
    assert torch.equal(ours[1, 3, 0, sizes[0] :], rotated[3, 0])
    assert (ours[:, 0:2] == 7).all()


def test_what_does_not_fit_is_refused() -> None:
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(4,)), 2, 2, 1, DEVICE)
    out = untouched(batch.query)
    with pytest.raises(ValueError, match="do not fit latents"):
        latent_draft_attention(replace(batch, latents=batch.latents[..., 1:]), out)
    with pytest.raises(ValueError, match=r"the scratch is .* of torch.float16, and the rows of"):
        latent_draft_attention(replace(batch, scratch=batch.scratch.half()), out)
    with pytest.raises(ValueError, match="the scratch is"):
        latent_draft_attention(replace(batch, scratch=batch.scratch[..., 1:]), out)
    with pytest.raises(ValueError, match="do not fit a workspace with room for"):
        latent_draft_attention(batch, out, workspace=nan_space(batch, 2), num_splits=2)
