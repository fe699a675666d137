"""The compiled kernels with windows, chunks and sinks: bf16 against float32, and in a graph."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.spec_decode.kernels.attention.test_tree_attention_gpu import (
    captured,
    check,
    check_problem,
    expected,
    label,
    sample_shapes,
)
from tests.support.samples.attention_samples import draft_problem
from tests.support.samples.attention_spaces import nan_space, nans
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem

pytestmark = pytest.mark.gpu


def windowed(count: int, seed: int) -> list[AttentionShape]:
    rng = random.Random(seed)
    return [
        replace(shape, window=rng.choice([1, 17, 128, 1024, 4096]), sinks=rng.random() < 0.5)
        for shape in sample_shapes(count, seed)
    ]


def named(shape: AttentionShape) -> str:
    kind = "c" if shape.chunked else "w"
    return f"{label(shape)}-{kind}{shape.window}{'-sinks' * shape.sinks}"


GEMMA = AttentionShape(
    rows=(64, 7, 0, 1), lens=(5000, 1030, 3, 1), kv_heads=2, group=2, head_size=512, block_size=32,
    dtype=torch.bfloat16, window=1024,
)  # fmt: skip


@pytest.mark.parametrize("shape", [*windowed(16, seed=5), GEMMA], ids=named)
def test_trees(shape: AttentionShape) -> None:
    check_problem(tree_problem(shape, "cuda"))


@pytest.mark.parametrize(
    "shape", [replace(shape, chunked=True) for shape in windowed(12, seed=7)], ids=named
)
def test_trees_with_chunks(shape: AttentionShape) -> None:
    check_problem(tree_problem(shape, "cuda"))


@pytest.mark.parametrize("level", [0, 4])
@pytest.mark.parametrize("shape", windowed(6, seed=6), ids=named)
def test_drafts(shape: AttentionShape, level: int) -> None:
    wide = replace(shape, window=max(8, shape.window))
    check_problem(draft_problem(wide, 8, 6, level, "cuda"))


def test_trees_in_a_graph() -> None:
    """The splits of a captured grid are bounded by the window, and hold for any length."""
    shape = AttentionShape(
        rows=(32, 1, 7), lens=(9000, 40, 300), kv_heads=2, group=4, head_size=64,
        dtype=torch.bfloat16, window=128, sinks=True,
    )  # fmt: skip
    problem = tree_problem(shape, "cuda")
    out, space = nans(problem.query), nan_space(problem, 32)
    graph = captured(lambda: tree_attention(problem, out, workspace=space))
    for seed, lens in enumerate([(9000, 40, 300), (32, 8990, 7), (129, 128, 127)]):
        new = tree_problem(replace(shape, lens=lens), "cuda", seed)
        width = new.block_table.shape[1]
        problem.block_table[:, :width] = new.block_table
        blocks = len(new.kv_cache)
        if blocks > len(problem.kv_cache):
            pytest.fail("the cache of the capture is too small for the next batch")
        problem.kv_cache[:blocks] = new.kv_cache
        for name in ("seq_lens", "query", "row_masks", "row_depths", "sinks", "num_rows"):
            getattr(problem, name).copy_(getattr(new, name))
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(out, expected(new))
