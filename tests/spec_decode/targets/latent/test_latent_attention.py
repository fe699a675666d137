"""Tree attention over latents equals a plain computation in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.samples.attention_samples import TOLERANCE, UNTOUCHED, untouched
from tests.support.samples.attention_spaces import nan_space
from tests.support.samples.latent_samples import LatentShape, latent_problem
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.latent.latent_attention import (
    copy_tree_rows,
    latent_attention,
)
from vllm_graft.spec_decode.targets.latent.plain_latent import (
    copy_tree_rows_reference,
    latent_attention_reference,
)
from vllm_graft.spec_decode.trees.batch import LatentBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def outputs(
    batch: LatentBatch, space: AttentionWorkspace | None = None, num_splits: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    ours, expected = untouched(batch.query), untouched(batch.query)
    latent_attention(batch, ours, workspace=space, num_splits=num_splits)
    latent_attention_reference(batch, expected)
    return ours, expected


def error(
    batch: LatentBatch, space: AttentionWorkspace | None = None, num_splits: int | None = None
) -> float:
    ours, expected = outputs(batch, space, num_splits)
    assert torch.equal(ours == UNTOUCHED, expected == UNTOUCHED)
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


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", FLOAT32, ids=str)
def test_equals_reference(shape: LatentShape, splits: int) -> None:
    batch = latent_problem(shape, DEVICE)
    space = nan_space(batch, 12) if splits > 1 else None
    assert error(batch, space, splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, fp8: bool) -> None:
    shape = LatentShape(
        rows=(16, 5), prefixes=(114, 2), rank=64, rope=32, dtype=dtype, fp8=fp8, heads=4
    )
    batch = latent_problem(shape, DEVICE)
    assert error(batch, nan_space(batch, 4)) < TOLERANCE[dtype]
    if fp8:
        batch = replace(batch, latents=batch.latents.view(torch.uint8))
        assert error(batch) < TOLERANCE[dtype]
        # Negative control: the scale counts.
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


def test_without_the_mask_the_rows_differ() -> None:
    batch = latent_problem(LatentShape(rows=(8, 64), prefixes=(32, 16)), DEVICE)
    masked, unmasked = untouched(batch.query), untouched(batch.query)
    latent_attention(batch, masked)
    batch.row_masks.fill_(-1)
    latent_attention(batch, unmasked)
    assert (masked - unmasked).abs().max() > 0.1


@pytest.mark.parametrize("part", ["query", "query_rope"])
def test_both_parts_of_the_query_count(part: str) -> None:
    batch = latent_problem(LatentShape(rows=(8,), prefixes=(32,)), DEVICE)
    whole, half = untouched(batch.query), untouched(batch.query)
    latent_attention(batch, whole)
    latent_attention(replace(batch, **{part: torch.zeros_like(getattr(batch, part))}), half)
    assert (whole - half).abs().max() > 0.1


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
    with pytest.raises(ValueError, match="max_rows must be 1 to 64"):
        latent_attention(replace(batch, max_rows=65), out)
    with pytest.raises(ValueError, match="do not fit latents"):
        latent_attention(replace(batch, latents=batch.latents[..., 1:]), out)
    with pytest.raises(ValueError, match="they must be equal unless the latents are e4m3"):
        latent_attention(replace(batch, latents=batch.latents.half()), out)
    with pytest.raises(ValueError, match="the output is"):
        latent_attention(batch, out[:, 1:])
    with pytest.raises(ValueError, match="contiguous"):
        latent_attention(batch, out.transpose(0, 2).contiguous().transpose(0, 2))
    with pytest.raises(ValueError, match="do not fit a workspace with room for"):
        latent_attention(batch, out, workspace=nan_space(batch, 2), num_splits=3)
