"""The second pass over latents completes the first one's output, and blanks rows of no tree."""

from dataclasses import replace

import pytest
import torch

from tests.support.references.prefix_reference import prefix_latents_reference
from tests.support.samples.attention_samples import TOLERANCE
from tests.support.samples.attention_spaces import nans
from tests.support.samples.latent_samples import LatentShape, latent_problem, with_padding
from vllm_graft.spec_decode.targets.latent.latent_attention import latent_attention
from vllm_graft.spec_decode.targets.latent.own_latents import OwnTile, attend_own_latents, own_tile
from vllm_graft.spec_decode.targets.latent.plain_latent import latent_attention_reference
from vllm_graft.spec_decode.trees.batch import LatentBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

FLOAT32 = [
    LatentShape(rows=(1,), prefixes=(0,)),
    LatentShape(rows=(4,), prefixes=(0,), heads=1),
    LatentShape(rows=(5, 0, 1), prefixes=(35, 9, 0), heads=16),
    LatentShape(rows=(64,), prefixes=(6,), heads=2, block_size=64),
    LatentShape(rows=(0, 61, 7), prefixes=(3, 136, 24), heads=2, rank=48, rope=8),
    LatentShape(rows=(3,), prefixes=(50,), heads=128),
    LatentShape(rows=(3, 2), prefixes=(40, 21), heads=2, rank=512, rope=64, block_size=64),
]


def problem(shape: LatentShape, *, padding: int = 0) -> LatentBatch:
    """A batch whose ``max_rows`` bounds all queries, as the first pass needs it."""
    batch = latent_problem(shape, DEVICE)
    widest = int(batch.query_start_loc.diff().max())
    return with_padding(replace(batch, max_rows=widest), padding)


def expected(batch: LatentBatch) -> torch.Tensor:
    """What both passes give: rows of no tree are zeros."""
    out = torch.zeros(batch.query.shape, device=batch.query.device)
    latent_attention_reference(batch, out)
    return out


def first_pass(batch: LatentBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefix's part; whatever must not be read is NaN, rows of no tree among it."""
    out, lse = prefix_latents_reference(batch, multiprocessors=1)
    return out.to(batch.query.dtype), lse


def in_place(batch: LatentBatch, tile: OwnTile | None = None) -> torch.Tensor:
    out, lse = first_pass(batch)
    attend_own_latents(batch, out, lse, out, tile=tile)
    return out


@pytest.mark.parametrize("shape", FLOAT32, ids=str)
def test_two_passes_equal_the_reference(shape: LatentShape) -> None:
    """The second pass reads no latent before the tree, and nothing of a prefix that is empty."""
    batch = problem(shape)
    wanted, (prefix, lse), apart = expected(batch), first_pass(batch), nans(batch.query)
    attend_own_latents(batch, prefix, lse, apart)
    assert (apart - wanted).abs().max() < TOLERANCE[torch.float32]
    assert torch.equal(in_place(batch), apart)
    if any(rows and before for rows, before in zip(shape.rows, shape.prefixes)):
        # Negative control: the prefix counts by its log-sum-exp.
        attend_own_latents(batch, prefix, lse - 3, apart)
        assert (apart - wanted).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    shape = LatentShape(rows=(16, 5), prefixes=(114, 2), rank=512, rope=64, dtype=dtype, heads=2)
    batch = problem(shape, padding=5)
    assert (in_place(batch).float() - expected(batch)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("padding", [1, 29, 200])
def test_padding_of_a_graph_becomes_zeros(padding: int) -> None:
    """Few and many rows behind the last request's, whose queries are NaN as well."""
    batch = problem(LatentShape(rows=(5, 0, 2), prefixes=(35, 9, 0)), padding=padding)
    found = in_place(batch)
    real = int(batch.query_start_loc[-1])
    assert len(found) == real + padding
    assert (found[real:] == 0).all()
    # Three rows before an odd request's tree, and a row of the one without a tree.
    blank = [False] * 5 + [True] * 4 + [False] * 2 + [True] * padding
    assert (found == 0).all(-1).all(-1).tolist() == blank
    assert (found - expected(batch)).abs().max() < TOLERANCE[torch.float32]
    # Negative control: those rows are NaN before, and the kernel that is alone leaves them.
    assert first_pass(batch)[0][real:].isnan().all()
    alone = nans(batch.query)
    latent_attention(batch, alone)
    assert alone.isnan().all(-1).all(-1).tolist() == blank


def test_a_dummy_run_is_blank() -> None:
    """A graph is captured over requests without trees; the rows are of all of them."""
    batch = problem(LatentShape(rows=(4, 4), prefixes=(20, 9)), padding=3)
    batch.num_rows.zero_()
    batch.prefix_lens.zero_()
    batch.latents.fill_(float("nan"))
    assert (in_place(batch) == 0).all()


def test_rows_left_over_from_an_earlier_batch_are_cut() -> None:
    batch = problem(LatentShape(rows=(4, 2), prefixes=(20, 9)))
    wanted = in_place(batch)
    batch.num_rows[0] = 7
    assert torch.equal(in_place(batch), wanted)


TILES = [OwnTile(16, 16, 4, 1), OwnTile(32, 32, 4, 2), OwnTile(64, 64, 8, 3), own_tile(1, 60, 48)]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_sizes_of_a_program_do_not_count(tile: OwnTile) -> None:
    shape = LatentShape(rows=(9, 4, 20), prefixes=(35, 0, 70), rank=48, rope=8)
    batch = problem(shape, padding=11)
    assert (in_place(batch, tile) - expected(batch)).abs().max() < TOLERANCE[torch.float32]


def test_many_rows_take_larger_programs() -> None:
    sizes = [own_tile(num_reqs, 32 * 16, 512).rows for num_reqs in (1, 4, 16, 32)]
    assert sizes == [16, 16, 32, 64]
    assert own_tile(1, 2, 512).rows == 16
    assert own_tile(300, 20, 24) == OwnTile(32, 32, 4, 3)
