"""The compiled kernel over latents: 16 bits against a float32 reference, eager and in a graph."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.samples.attention_spaces import captured, nan_space, nans
from tests.support.samples.latent_samples import LatentShape, latent_draft_problem, latent_problem
from vllm_graft.spec_decode.targets.latent.latent_attention import latent_attention
from vllm_graft.spec_decode.targets.latent.plain_latent import latent_attention_reference
from vllm_graft.spec_decode.trees.batch import LatentBatch, LatentDraftBatch

pytestmark = pytest.mark.gpu

RELATIVE = 2e-2


def sample_shapes(count: int, seed: int, *, draft: bool = False) -> list[LatentShape]:
    """Sample the matrix: batch 1-16, prefix 0-8k, rows 1-64, heads 1-128, blocks, formats."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        batch = rng.choice([1, 2, 5, 16])
        most = 0 if draft else rng.choice([1, 2, 8, 16, 33, 64])
        prefix = rng.choice([1, 100, 1000, 8000 if batch <= 2 else 2000])
        rows = () if draft else (*(rng.randint(0, most) for _ in range(batch - 1)), most)
        shapes.append(
            LatentShape(
                rows=rows,
                prefixes=tuple(rng.randint(0, prefix) for _ in range(batch)),
                heads=rng.choice([1, 8, 16, 16, 128 if batch <= 5 else 32]),
                rank=512,
                rope=64,
                block_size=rng.choice([16, 64]),
                dtype=rng.choice([torch.bfloat16, torch.float16]),
                fp8=rng.random() < 0.3,
            )
        )
    return shapes


def label(value: LatentShape | int) -> str:
    if isinstance(value, int):
        return str(value)
    kind = "fp8" if value.fp8 else str(value.dtype).removeprefix("torch.")
    return (
        f"b{len(value.prefixes)}-r{max(value.rows, default=0)}-n{max(value.prefixes)}-"
        f"h{value.heads}-p{value.block_size}-{kind}"
    )


def check(ours: torch.Tensor, batch: LatentBatch | LatentDraftBatch) -> None:
    expected = nans(batch.query)
    if isinstance(batch, LatentBatch):
        latent_attention_reference(batch, expected)
    else:
        latent_attention_reference(batch, expected)
        assert ours.isfinite().all()
    assert torch.equal(ours.isnan(), expected.isnan())
    error = (ours.float() - expected.float()).nan_to_num().abs().max()
    scale = expected.float().nan_to_num().abs().max()
    assert error <= RELATIVE * scale, f"error {error:.4f} of values up to {scale:.4f}"


@pytest.mark.parametrize("shape", sample_shapes(16, seed=1), ids=label)
def test_equals_reference(shape: LatentShape) -> None:
    batch = latent_problem(shape, "cuda")
    for mixed in (False, True):
        ours = nans(batch.query)
        latent_attention(replace(batch, mixed=mixed), ours, workspace=nan_space(batch, 64))
        check(ours, batch)


def sample_cases(count: int, seed: int) -> list[tuple[LatentShape, int, int, int]]:
    """Sample shapes of levels, each with topk 1-10, levels 1-7, and one of these."""
    rng = random.Random(seed)
    steps = [rng.randint(1, 7) for _ in range(count)]
    return [
        (shape, rng.choice([1, 4, 8, 10]), most, rng.randrange(most))
        for shape, most in zip(sample_shapes(count, seed, draft=True), steps)
    ]


@pytest.mark.parametrize(("shape", "topk", "steps", "level"), sample_cases(16, seed=1), ids=label)
def test_draft_equals_reference(shape: LatentShape, topk: int, steps: int, level: int) -> None:
    batch = latent_draft_problem(shape, topk, steps, level, "cuda")
    for workspace in (None, nan_space(batch, 64)):
        ours = nans(batch.query)
        latent_attention(batch, ours, workspace=workspace)
        check(ours, batch)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_replays_of_a_graph_follow_the_device(heads: int, draft: bool) -> None:
    """Rows or ancestors, prefixes, pages and masks change between replays of the captured grid."""
    shape = LatentShape(
        rows=(16, 3, 0, 7), prefixes=(3000, 40, 9, 700), heads=heads, rank=512, rope=64,
        block_size=64, dtype=torch.bfloat16,
    )  # fmt: skip
    batch: Any = latent_draft_problem(shape, 8, 4, 2, "cuda") if draft else None
    batch = batch or latent_problem(shape, "cuda")
    out, workspace = nans(batch.query), nan_space(batch, 64)

    def change(rows: tuple[int, ...], prefixes: tuple[int, ...]) -> None:
        batch.prefix_lens.copy_(torch.tensor(prefixes))
        if draft:
            batch.ancestors[:, :, 0] = batch.ancestors[:, :, 0].roll(1, 1)
        else:
            batch.num_rows.copy_(torch.tensor(rows))

    graph = captured(lambda: latent_attention(batch, out, workspace=workspace))
    for given in ((shape.rows, shape.prefixes), ((1, 2, 1, 0), (0, 39, 8, 3))):
        change(*given)
        out.fill_(float("nan"))
        graph.replay()
        check(out, batch)
    # Negative control: the rows of before are not the rows of now.
    change((1, 2, 1, 0), (0, 0, 0, 0))
    stale = out.clone()
    graph.replay()
    assert not torch.equal(stale, out)
