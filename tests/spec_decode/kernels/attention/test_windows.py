"""Sliding windows, chunks and sinks in the tree kernel and in its plain counterpart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.spec_decode.kernels.attention.test_tree_attention import (
    DEVICE,
    draft_error,
    tree_error,
)
from tests.support.references.tree_reference import tree_attention_reference
from tests.support.samples.attention_samples import TOLERANCE, draft_problem, untouched
from tests.support.samples.attention_spaces import nan_space
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem

SIZES = {"rows": (9, 0, 16, 40, 3), "lens": (150, 30, 17, 300, 3), "group": 2}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 16, 33, 128, 1000])
def test_trees_equal_the_reference(window: int, sinks: bool, splits: int) -> None:
    """Blocks that no row sees hold NaN, which a read would leave in the output."""
    problem = tree_problem(AttentionShape(**SIZES, window=window, sinks=sinks), DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    assert tree_error(problem, workspace=space, num_splits=splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(("head_size", "block_size"), [(64, 16), (256, 48), (512, 32)])
def test_head_sizes_of_models_with_windows(head_size: int, block_size: int) -> None:
    shape = AttentionShape(
        rows=(12, 5), lens=(200, 70), kv_heads=2, group=2, head_size=head_size,
        block_size=block_size, dtype=torch.bfloat16, window=50, sinks=True,
    )  # fmt: skip
    problem = tree_problem(shape, DEVICE)
    assert tree_error(problem, workspace=nan_space(problem, 4)) < TOLERANCE[torch.bfloat16]


def chain_outputs(
    shape: AttentionShape, run: object, sees: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of tree attention and of torch for a chain, whose mask no code of ours makes.

    Slots and depths agree in a chain.

    Args:
        shape: one request, two heads that share K/V.
        run: tree attention.
        sees: whether a row sees a key that is not behind it, by their positions.
    """
    rows, keys = shape.rows[0], shape.lens[0]
    problem = tree_problem(shape, DEVICE)
    line = torch.arange(rows, device=DEVICE)
    problem = replace(
        problem, row_masks=(2 << line) - 1, row_depths=line.to(torch.int32), max_rows=rows
    )
    out = untouched(problem.query)
    run(problem, out)  # type: ignore[operator]
    positions = torch.arange(keys, device=DEVICE)
    blocks = problem.block_table[0, positions // shape.block_size].long()
    both = problem.kv_cache[blocks, 0, positions % shape.block_size].nan_to_num(0)
    key, value = both[None].expand(2, -1, -1).chunk(2, dim=-1)
    row = positions[keys - rows :, None]
    mask = (row >= positions) & sees(row, positions)
    expected = F.scaled_dot_product_attention(
        problem.query.transpose(0, 1), key, value, attn_mask=mask
    )
    return out, expected.transpose(0, 1)


@pytest.mark.parametrize("window", [3, 20, 64])
@pytest.mark.parametrize("run", [tree_attention, tree_attention_reference])
def test_a_chain_is_what_torch_computes_with_a_window(window: int, run: object) -> None:
    shape = AttentionShape(rows=(7,), lens=(60,), group=2, window=window)
    out, expected = chain_outputs(shape, run, lambda row, key: row - key < window)
    assert (out - expected).abs().max() < 1e-5


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("size", [1, 4, 16, 48, 128, 149, 1000])
def test_chunks_equal_the_reference(size: int, splits: int) -> None:
    """Trees cross the ends of chunks; blocks before the root's chunk hold NaN."""
    problem = tree_problem(AttentionShape(**SIZES, window=size, chunked=True), DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    assert tree_error(problem, workspace=space, num_splits=splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("size", [3, 20, 57, 64])
@pytest.mark.parametrize("run", [tree_attention, tree_attention_reference])
def test_a_chain_is_what_torch_computes_with_chunks(size: int, run: object) -> None:
    """Its rows have the positions 53 to 59, so that chunks of 57 end within it."""
    shape = AttentionShape(rows=(7,), lens=(60,), group=2, window=size, chunked=True)
    out, expected = chain_outputs(shape, run, lambda row, key: key // size == row // size)
    assert (out - expected).abs().max() < 1e-5


def test_chunks_by_slot_are_wrong() -> None:
    """Negative control: with slots in place of depths, rows begin a chunk too early."""
    shape = AttentionShape(rows=(12,), lens=(100,), window=94, chunked=True)
    problem = tree_problem(shape, DEVICE)
    by_slot = torch.arange(12, dtype=torch.int32, device=DEVICE)
    out, expected = untouched(problem.query), untouched(problem.query)
    tree_attention(replace(problem, row_depths=by_slot), out)
    tree_attention_reference(problem, expected)
    assert (out - expected).abs().max() > 1e-2


def test_distance_by_slot_is_wrong() -> None:
    """Negative control: with slots instead of depths a tree's rows see other keys."""
    shape = AttentionShape(rows=(12,), lens=(100,), window=8)
    problem = tree_problem(shape, DEVICE)
    by_slot = torch.arange(12, dtype=torch.int32, device=DEVICE)
    assert (problem.row_depths != by_slot).any()
    out, expected = untouched(problem.query), untouched(problem.query)
    tree_attention(replace(problem, row_depths=by_slot), out)
    tree_attention_reference(problem, expected)
    assert (out - expected).abs().max() > 1e-2


def test_a_sink_takes_weight() -> None:
    """This is a negative control; a sink is one more term of the sum, without a value."""
    problem = tree_problem(AttentionShape(rows=(1,), lens=(1,), group=2, sinks=True), DEVICE)
    assert problem.sinks is not None
    with_sink, without = untouched(problem.query), untouched(problem.query)
    tree_attention(problem, with_sink)
    tree_attention(replace(problem, sinks=None), without)
    key = problem.kv_cache[problem.block_table[0, 0].long(), 0, 0, :64]
    weight = ((problem.query[0] @ key) * problem.scale - problem.sinks).sigmoid()
    assert (with_sink[0] - weight[:, None] * without[0]).abs().max() < 1e-6


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("window", "level"), [(0, 1), (4, 3), (17, 0), (40, 2), (500, 3)])
def test_drafts_equal_the_reference(window: int, level: int, sinks: bool, splits: int) -> None:
    shape = AttentionShape(rows=(), lens=(90, 16, 1, 0), group=2, window=window, sinks=sinks)
    problem = draft_problem(shape, topk=4, steps=4, level=level, device=DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    assert draft_error(problem, workspace=space, num_splits=splits) < TOLERANCE[torch.float32]


def test_a_window_needs_depths() -> None:
    problem = tree_problem(AttentionShape(rows=(2,), lens=(9,), window=3), DEVICE)
    with pytest.raises(ValueError, match="a window of 3 keys needs the depths of rows"):
        tree_attention(replace(problem, row_depths=None), untouched(problem.query))
