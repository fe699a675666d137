"""FlashAttention 3 over latents and the second pass, compiled: eager, and in replayed graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.attention_spaces import check_rows, nans
from tests.support.synchronisations import refused_synchronisations
from vllm_graft.spec_decode.attention.choice import KernelChoice, Point
from vllm_graft.spec_decode.attention.latents.latent_timing import LatentGeometry
from vllm_graft.spec_decode.attention.latents.latent_two_pass import (
    LATENT_PASSES,
    flash_prefix_latents,
    plan_latent_prefix,
)
from vllm_graft.spec_decode.attention.latents.plain_latent import (
    latent_attention_reference,
    prefix_latents_reference,
)
from vllm_graft.spec_decode.attention.two_pass import TwoPass, two_pass_attention
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
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


def run(batch: LatentBatch) -> torch.Tensor:
    out = nans(batch.query)
    two_pass_attention(
        batch,
        out,
        multiprocessors=SPLITS,
        prefix_attention=LATENT_PASSES.prefix,
        own_attention=LATENT_PASSES.own,
    )
    return out


def check(out: torch.Tensor, batch: LatentBatch) -> None:
    """Check that each row and head is right relative to its norm."""
    wanted = nans(batch.query).float()
    latent_attention_reference(batch, wanted)
    check_rows(out, wanted, RELATIVE)


SIZES = [(1, 32, 2048, 16), (4, 8, 9000, 16), (5, 64, 700, 16), (3, 33, 3000, 128), (16, 1, 500, 8)]


@pytest.mark.parametrize(("requests", "rows", "keys", "heads"), SIZES)
def test_both_passes(requests: int, rows: int, keys: int, heads: int) -> None:
    batch = make(requests, rows, keys, heads=heads)
    check(run(batch), batch)
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


@pytest.mark.parametrize("heads", [16, 128])
def test_in_a_graph(heads: int) -> None:
    """Lengths change between replays, in the very tensors of the capture."""
    static = replace(make(4, 16, 4000, heads=heads), max_seq_len=32768)
    out, both, metadata = (
        nans(static.query),
        TwoPass(KernelChoice("flash"), LATENT_PASSES),
        object(),
    )

    def layers() -> None:
        for _ in range(3):
            both.attend(static, out, metadata, multiprocessors=SPLITS)

    # vLLM captures like this too: over a batch with nothing to compute.
    static.num_rows.zero_()
    static.prefix_lens.zero_()
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for rows, prefixes in ((16, (3900, 1, 0, 64)), (16, (2, 3980, 700, 63)), (0, (0, 0, 0, 0))):
        static.num_rows.fill_(rows)
        static.prefix_lens.copy_(torch.tensor(prefixes))
        out.fill_(float("nan"))
        graph.replay()
        check(out, static)


def test_no_host_synchronisation() -> None:
    batch = make(2, 32, 900)
    both, out = TwoPass(KernelChoice("flash"), LATENT_PASSES), nans(batch.query)
    with refused_synchronisations():
        both.attend(batch, out, object(), multiprocessors=SPLITS)
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
