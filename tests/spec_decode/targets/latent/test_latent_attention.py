"""Tree attention over latents equals a plain computation in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.samples.attention_samples import TOLERANCE, UNTOUCHED, untouched
from tests.support.samples.attention_spaces import nan_space
from tests.support.samples.latent_samples import LatentShape, latent_draft_problem, latent_problem
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.tree_attention import write_scratch
from vllm_graft.spec_decode.targets.dense.plain_attention import write_scratch_reference
from vllm_graft.spec_decode.targets.latent.latent_attention import copy_tree_rows, latent_attention
from vllm_graft.spec_decode.targets.latent.plain_latent import (
    copy_tree_rows_reference,
    latent_attention_reference,
)
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


Batch = LatentBatch | LatentDraftBatch


def outputs(
    batch: Batch, space: AttentionWorkspace | None = None, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ours, expected = untouched(batch.query), untouched(batch.query)
    latent_attention(batch, ours, workspace=space, num_splits=num_splits)
    latent_attention_reference(batch, expected)
    return ours, expected


def error(batch: Batch, *how: Any) -> float:
    ours, expected = outputs(batch, *how)
    assert torch.equal(ours == UNTOUCHED, expected == UNTOUCHED)
    assert expected.isfinite().all()
    return float((ours.float() - expected.float()).abs().max())


FLOAT32 = [
    LatentShape(rows=(1,), prefixes=(0,)),
    LatentShape(rows=(4,), prefixes=(0,), heads=1),
    LatentShape(rows=(5, 0, 1), prefixes=(35, 9, 0), heads=16),
    LatentShape(rows=(64,), prefixes=(6,), heads=2, block_size=64),
    LatentShape(rows=(0, 64, 7), prefixes=(3, 136, 24), heads=2, rank=48, rope=8),
    LatentShape(rows=(3,), prefixes=(50,), heads=128),
    LatentShape(rows=(3, 2), prefixes=(40, 21), heads=2, rank=512, rope=64, block_size=64),
]


DRAFT_FLOAT32 = [
    (LatentShape(rows=(), prefixes=(0,), heads=1), 1, 1, 0),
    (LatentShape(rows=(), prefixes=(35, 0, 1), heads=16), 4, 3, 2),
    (LatentShape(rows=(), prefixes=(3, 136), heads=2, rank=48, rope=8), 8, 4, 1),
    (LatentShape(rows=(), prefixes=(6,), heads=5, block_size=64), 10, 6, 5),
    (LatentShape(rows=(), prefixes=(40, 21), heads=2, rank=512, rope=64, block_size=64), 3, 2, 1),
]
"""Shapes of levels, with children of a node, levels, and the one that drafts."""


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [*FLOAT32, *DRAFT_FLOAT32], ids=str)
def test_equals_reference(case: Any, splits: int) -> None:
    is_draft = isinstance(case, tuple)
    batch = latent_draft_problem(*case, DEVICE) if is_draft else latent_problem(case, DEVICE)
    space = nan_space(batch, 12) if splits > 1 else None
    assert error(batch, space, splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, fp8: bool, draft: bool) -> None:
    shape = LatentShape(
        rows=(16, 5), prefixes=(114, 2), rank=64, rope=32, dtype=dtype, fp8=fp8, heads=4
    )
    batch: Batch = latent_problem(shape, DEVICE)
    if draft:
        batch = latent_draft_problem(shape, 4, 3, 2, DEVICE)
    assert error(batch, nan_space(batch, 4)) < TOLERANCE[dtype]
    if fp8:
        batch = replace(batch, latents=batch.latents.view(torch.uint8))
        assert error(batch) < TOLERANCE[dtype]
        # Negative control: the scale counts, and a draft's scratch has none.
        unscaled, scaled = outputs(replace(batch, k_scale=None))[0], outputs(batch)[0]
        assert float((unscaled.float() - scaled.float()).abs().max()) > 0.1


def test_narrow_tiles_of_mixed_batches() -> None:
    shape = LatentShape(rows=(20, 0, 3), prefixes=(70, 40, 14), heads=4, dtype=torch.bfloat16)
    batch = replace(latent_problem(shape, DEVICE), max_rows=64, mixed=True)
    assert error(batch) < TOLERANCE[torch.bfloat16]


def test_rows_of_a_dummy_run_are_cut_to_the_query() -> None:
    """A number of rows that is left over from an earlier batch exceeds the query."""
    batch = latent_problem(LatentShape(rows=(4, 2), prefixes=(20, 9)), DEVICE)
    batch.num_rows.fill_(6)
    batch = replace(batch, max_rows=3)
    ours = untouched(batch.query)
    latent_attention(batch, ours)
    computed = (ours != UNTOUCHED).all(-1).all(-1)
    assert computed.tolist() == [False, True, True, True, False, False, True, True, True]


def test_masks_and_both_parts_of_the_query_count() -> None:
    """Negative controls: each row sees every other one, or a part of the query is zero."""
    batch = latent_problem(LatentShape(rows=(8, 64), prefixes=(32, 16)), DEVICE)
    right = outputs(batch)[0]
    for name, instead in (
        ("row_masks", torch.full_like(batch.row_masks, -1)),
        ("query", torch.zeros_like(batch.query)),
        ("query_rope", torch.zeros_like(batch.query_rope)),
    ):
        other = outputs(replace(batch, **{name: instead}))[0]
        assert (right - other).abs().max() > 0.1, name


def test_last_bit_makes_the_last_key_visible() -> None:
    batch = latent_problem(LatentShape(rows=(64,), prefixes=(0,), heads=1), DEVICE)
    batch.row_masks.fill_(0)
    batch.row_masks[63] = -(1 << 63)
    out = untouched(batch.query)
    latent_attention(batch, out)
    last = batch.latents[batch.block_table[0, 3].long(), 15, : batch.query.shape[2]]
    torch.testing.assert_close(out[63, 0], last, atol=1e-6, rtol=0)
    assert (out[:63] == 0).all()


def test_copies_rows_of_trees_alone() -> None:
    batch = latent_problem(LatentShape(rows=(5, 0, 64, 1), prefixes=(4, 3, 2, 1)), DEVICE)
    source = torch.randn(len(batch.query) + 4, 1500, device=DEVICE)
    ours, expected = untouched(source), untouched(source)
    copy_tree_rows(source, ours, batch)
    copy_tree_rows_reference(source, expected, batch)
    assert torch.equal(ours, expected)
    assert (ours == UNTOUCHED).any()
    assert not (ours == UNTOUCHED).all()


def test_what_does_not_fit_is_refused() -> None:
    batch = latent_problem(LatentShape(rows=(5,), prefixes=(4,)), DEVICE)
    out = untouched(batch.query)
    with pytest.raises(ValueError, match="do not fit latents"):
        latent_attention(replace(batch, latents=batch.latents[..., 1:]), out)
    with pytest.raises(ValueError, match="they must be equal unless the latents are e4m3"):
        latent_attention(replace(batch, latents=batch.latents.half()), out)
    with pytest.raises(ValueError, match="contiguous"):
        latent_attention(batch, out.transpose(0, 2).contiguous().transpose(0, 2))


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


def test_the_reference_is_attention_over_the_prefix_and_the_ancestors() -> None:
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(19, 0)), 3, 4, 2)
    found = untouched(batch.query)
    latent_attention_reference(batch, found)
    torch.testing.assert_close(found, row_by_row(batch), atol=1e-5, rtol=1e-5)


def test_padding_sees_its_own_scratch_alone() -> None:
    """A request without a prefix; its first level is its own latent."""
    batch = latent_draft_problem(LatentShape(rows=(), prefixes=(0, 7)), 2, 2, 0, DEVICE)
    out = untouched(batch.query)
    latent_attention(batch, out)
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
