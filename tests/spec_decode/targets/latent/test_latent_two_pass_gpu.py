"""FlashAttention 3 over latents and the second pass, compiled: eager, and in replayed graphs."""

from dataclasses import replace

import pytest
import torch

from tests.support.references.prefix_reference import prefix_latents_reference
from tests.support.samples.attention_spaces import check_rows, nans
from tests.support.watches import refused_synchronisations
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.two_pass import (
    KernelChoice,
    Passes,
    Point,
    TwoPass,
    two_pass_attention,
)
from vllm_graft.spec_decode.targets.latent.latent_two_pass import (
    LATENT_PASSES,
    LatentGeometry,
    flash_prefix_latents,
    plan_latent_prefix,
)
from vllm_graft.spec_decode.targets.latent.own_latents import OwnTile, attend_own_latents
from vllm_graft.spec_decode.targets.latent.plain_latent import latent_attention_reference
from vllm_graft.spec_decode.trees.batch import LatentBatch
from vllm_graft.spec_decode.tuning.attention_timing import measure

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("flash_attention_3")]

RELATIVE = 2e-2
SPLITS = 132


def make(requests: int, rows: int, keys: int, *, heads: int = 16) -> LatentBatch:
    """Requests of equal rows whose prefixes differ; the last one has none, if it is not alone."""
    geometry = LatentGeometry(heads, 512, 64, torch.bfloat16, 64)
    batch = geometry.problem(Point(requests, rows, keys), "cuda")
    shorter = torch.arange(requests, dtype=torch.int32, device="cuda") * 37 + 1
    batch.prefix_lens.sub_(shorter).clamp_(min=0)
    batch.prefix_lens[max(1, requests - 1) :] = 0
    return batch


def nan_prefix(
    batch: LatentBatch, *, multiprocessors: int, plan: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pass, with NaN in what the second must not read: rows of no tree or no prefix."""
    out, lse = flash_prefix_latents(batch, multiprocessors=multiprocessors, plan=plan)
    row = torch.arange(len(out), device=out.device)[:, None]
    ends = batch.query_start_loc[1 : batch.num_reqs + 1]
    begins = torch.where(batch.prefix_lens > 0, ends - batch.num_rows, ends)
    read = ((row >= begins) & (row < ends)).any(1)
    out.masked_fill_(~read[:, None, None], float("nan"))
    lse.masked_fill_(~read, float("nan"))
    return out, lse


NAN_PASSES = Passes(plan_latent_prefix, nan_prefix, attend_own_latents)


def run(batch: LatentBatch) -> torch.Tensor:
    """Both passes in place, over NaN where the second has to write without reading."""
    return two_pass_attention(
        batch,
        None,
        multiprocessors=SPLITS,
        prefix_attention=NAN_PASSES.prefix,
        own_attention=NAN_PASSES.own,
    )


def check(out: torch.Tensor, batch: LatentBatch) -> None:
    """Check each row and head relative to its norm; rows of no tree are zeros."""
    wanted = torch.zeros(batch.query.shape, device=out.device)
    latent_attention_reference(batch, wanted)
    check_rows(out, wanted, RELATIVE)


SIZES = [(1, 32, 2048, 16), (4, 8, 9000, 16), (5, 64, 700, 16), (3, 33, 3000, 128), (16, 1, 500, 8)]


@pytest.mark.parametrize(("requests", "rows", "keys", "heads"), SIZES)
def test_both_passes(requests: int, rows: int, keys: int, heads: int) -> None:
    batch = make(requests, rows, keys, heads=heads)
    found = run(batch)
    check(found, batch)
    # What is completed in place has the bits of what is written elsewhere.
    apart = nans(batch.query)
    attend_own_latents(batch, *flash_prefix_latents(batch, multiprocessors=SPLITS), apart)
    assert torch.equal(apart, found)
    wanted, wanted_lse = prefix_latents_reference(batch, multiprocessors=SPLITS)
    seen = ~wanted_lse.isnan()
    for plan in (None, plan_latent_prefix(batch, multiprocessors=SPLITS)):
        out, lse = flash_prefix_latents(batch, multiprocessors=SPLITS, plan=plan)
        assert lse.shape == wanted_lse.shape
        assert (lse - wanted_lse)[seen].abs().max() < 2e-2
        error = (out.float() - wanted).norm(dim=-1)[seen.T]
        assert (error <= RELATIVE * wanted.norm(dim=-1)[seen.T]).all()


def test_without_the_mask_the_error_is_seen() -> None:
    batch = make(2, 32, 64)
    out = run(replace(batch, row_masks=torch.full_like(batch.row_masks, -1)))
    with pytest.raises(AssertionError):
        check(out, batch)


TILES = [
    OwnTile(16, 128, 4, 3),
    OwnTile(32, 128, 4, 3),
    OwnTile(64, 64, 8, 3),
    OwnTile(64, 128, 8, 2),
]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_sizes_of_a_program_do_not_count(tile: OwnTile) -> None:
    """Each size completes the same prefix, rows of padding among it."""
    batch = make(5, 32, 900)
    batch.query_start_loc[-1] -= 20
    batch.num_rows[-1] -= 20
    out, lse = nan_prefix(batch, multiprocessors=SPLITS)
    attend_own_latents(batch, out, lse, out, tile=tile)
    check(out, batch)


@pytest.mark.parametrize("heads", [16, 128])
def test_in_a_graph(heads: int) -> None:
    """Lengths and queries change between replays, in the very tensors of the capture."""
    static = replace(make(4, 16, 4000, heads=heads), max_seq_len=32768)
    both, metadata = TwoPass(KernelChoice("flash"), NAN_PASSES), object()

    def layers() -> torch.Tensor:
        for _ in range(3):
            out = both.attend(static, None, metadata, multiprocessors=SPLITS)
        return out

    # vLLM captures like this too: over a batch with nothing to compute.
    static.num_rows.zero_()
    static.prefix_lens.zero_()
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    # Full batches, an empty one, narrow trees, and requests that are padding.
    for rows, prefixes in (
        ((16, 16, 16, 16), (3900, 1, 0, 64)),
        ((16, 16, 16, 16), (2, 3980, 700, 63)),
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((3, 16, 7, 1), (50, 3000, 0, 9)),
        ((5, 16, 0, 0), (3900, 70, 0, 0)),
    ):
        static.num_rows.copy_(torch.tensor(rows))
        static.prefix_lens.copy_(torch.tensor(prefixes))
        static.query_start_loc.copy_(torch.tensor([0, *rows]).cumsum(0))
        out.fill_(float("nan"))
        graph.replay()
        check(out, static)
    # Negative control: without the second pass, rows of padding stay NaN.
    assert nan_prefix(static, multiprocessors=SPLITS)[0][21:].isnan().all()


def test_no_host_synchronisation() -> None:
    batch = make(2, 32, 900)
    both = TwoPass(KernelChoice("flash"), LATENT_PASSES)
    with refused_synchronisations():
        out = both.attend(batch, None, object(), multiprocessors=SPLITS)
    check(out, batch)


def test_measurement() -> None:
    geometry = LatentGeometry(16, 512, 64, torch.bfloat16, 64)
    where = [Point(1, 8, 512), Point(4, 32, 2048), Point(4, 32, 8192)]
    space = AttentionWorkspace.allocate(4, 32, 16, 512, 32, "cuda")
    costs = measure(geometry, where, space, 8192, "cuda")
    assert list(costs) == where
    for times in costs.values():
        assert times.keys() == {"triton", "flash"}
        assert all(0.5 < time < 1e4 for time in times.values())
    for kernel in ("triton", "flash"):
        assert costs[where[2]][kernel] > costs[where[1]][kernel]  # type: ignore[index]
