"""Attention over trees, in one pass and in two, equals a plain computation in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.crossed import crossed
from tests.support.references.prefix_reference import prefix_attention_reference
from tests.support.references.tree_reference import (
    tree_attention_reference,
    write_scratch_reference,
)
from tests.support.samples.attention_samples import (
    TOLERANCE,
    UNTOUCHED,
    AttentionShape,
    draft_problem,
    tree_problem,
    untouched,
)
from tests.support.samples.attention_spaces import nan_space
from vllm_graft.spec_decode.kernels.attention.attention_plan import (
    MIN_SPLIT_KEYS,
    AttentionWorkspace,
    split_count,
)
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention, write_scratch
from vllm_graft.spec_decode.targets.dense.two_pass import two_pass_attention
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Attend = Callable[..., None]


def two_passes(batch: TreeBatch, out: torch.Tensor) -> None:
    """The first pass in plain torch, the second interpreted or compiled."""
    two_pass_attention(batch, out, multiprocessors=8, prefix_attention=prefix_attention_reference)


BOTH = pytest.mark.parametrize("attend", [tree_attention, two_passes])


def output(batch: TreeBatch, attend: Attend = tree_attention, **options: Any) -> torch.Tensor:
    out = untouched(batch.query)
    attend(batch, out, **options)
    return out


def tree_error(batch: TreeBatch, attend: Attend = tree_attention, **options: Any) -> float:
    ours, expected = output(batch, attend, **options), untouched(batch.query)
    tree_attention_reference(batch, expected)
    assert torch.equal(ours == UNTOUCHED, expected == UNTOUCHED)
    return float((ours.float() - expected.float()).abs().max())


def draft_error(problem: DraftBatch, **options: Any) -> float:
    ours, expected = untouched(problem.query), untouched(problem.query)
    tree_attention(problem, ours, **options)
    tree_attention_reference(problem, expected)
    return float((ours.float() - expected.float()).abs().max())


FLOAT32 = [
    # There is no prefix, so that the first of two passes leaves NaN.
    AttentionShape(rows=(1,), lens=(1,)),
    AttentionShape(rows=(4, 3), lens=(4, 50)),
    # Odd requests have more rows than the tree; a request without rows is left alone.
    AttentionShape(rows=(5, 0, 1), lens=(40, 9, 1), group=2),
    AttentionShape(rows=(64,), lens=(70,), kv_heads=2, group=3),
    AttentionShape(rows=(0, 64, 7), lens=(3, 200, 31), group=8, block_size=128),
    AttentionShape(rows=(9, 16), lens=(150, 17), group=1, block_size=48, slots_first=True),
    AttentionShape(rows=(8, 3), lens=(33, 64), kv_heads=3, group=4, head_size=80),
    AttentionShape(rows=(8,), lens=(65,), kv_heads=2, head_size=128, slots_first=True),
    AttentionShape(rows=(8,), lens=(100,), group=2, head_size=256, block_size=32),
]


@pytest.mark.parametrize(("shape", "splits"), crossed(FLOAT32, [1, 3]))
def test_tree_equals_reference(shape: AttentionShape, splits: int) -> None:
    problem = tree_problem(shape, DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    assert tree_error(problem, workspace=space, num_splits=splits) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("shape", FLOAT32, ids=str)
def test_two_passes_equal_the_reference(shape: AttentionShape) -> None:
    assert tree_error(tree_problem(shape, DEVICE), two_passes) < TOLERANCE[torch.float32]


def test_narrow_tiles_of_mixed_batches() -> None:
    shape = AttentionShape(
        rows=(20, 0, 3), lens=(90, 40, 17), group=4, head_size=128, dtype=torch.bfloat16
    )
    problem = replace(tree_problem(shape, DEVICE), max_rows=64, mixed=True)
    assert tree_error(problem) < TOLERANCE[torch.bfloat16]


@BOTH
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tree_dtypes(dtype: torch.dtype, fp8: bool, attend: Attend) -> None:
    shape = AttentionShape(
        rows=(16, 5), lens=(130, 7), kv_heads=2, group=3, head_size=96, dtype=dtype, fp8=fp8
    )
    problem = tree_problem(shape, DEVICE)
    if attend is tree_attention:
        assert tree_error(problem, workspace=nan_space(problem, 4)) < TOLERANCE[dtype]
    assert tree_error(problem, attend) < TOLERANCE[dtype]
    if fp8:
        small = replace(problem, kv_cache=problem.kv_cache.view(torch.uint8))
        assert attend is two_passes or tree_error(small) < TOLERANCE[dtype]
        assert tree_error(replace(problem, k_scale=None, v_scale=None), attend) < TOLERANCE[dtype]


def test_every_finite_e4m3_number() -> None:
    """The output of one key is its value, so each code passes through the kernel."""
    problem = tree_problem(AttentionShape(rows=(1,), lens=(1,), head_size=128, fp8=True), DEVICE)
    problem = replace(problem, v_scale=None)
    cache = problem.kv_cache.view(torch.uint8)
    for sign in (0, 128):
        codes = torch.arange(128, device=DEVICE, dtype=torch.int32).clamp(max=126) + sign
        cache[..., 128:] = codes.to(torch.uint8)
        out = untouched(problem.query)
        tree_attention(problem, out)
        expected = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
        assert torch.equal(out[0, 0], expected)


@BOTH
def test_soft_cap(attend: Attend) -> None:
    problem = tree_problem(AttentionShape(rows=(6, 4), lens=(50, 4), group=2), DEVICE)
    problem = replace(problem, scale=3.0)
    capped = replace(problem, soft_cap=5.0)
    assert tree_error(capped, attend) < 1e-4
    assert (output(capped, attend) - output(problem, attend)).abs().max() > 0.01


@BOTH
def test_without_the_mask_the_rows_differ(attend: Attend) -> None:
    problem = tree_problem(AttentionShape(rows=(8, 64), lens=(40, 80)), DEVICE)
    masked = output(problem, attend)
    problem.row_masks.fill_(-1)
    assert (masked - output(problem, attend)).abs().max() > 0.1


@BOTH
def test_last_bit_makes_the_last_key_visible(attend: Attend) -> None:
    problem = tree_problem(AttentionShape(rows=(64,), lens=(64,)), DEVICE)
    problem.row_masks[63] = -(1 << 63)
    page = problem.block_table[0, 63 // 16]
    value = problem.kv_cache[page, 0, 63 % 16, 64:]
    assert torch.allclose(output(problem, attend)[63, 0], value, atol=1e-6)


def test_row_that_sees_nothing_is_zero() -> None:
    problem = tree_problem(AttentionShape(rows=(3,), lens=(3,)), DEVICE)
    problem.row_masks[1] = 0
    out = untouched(problem.query)
    tree_attention(problem, out, workspace=nan_space(problem, 4), num_splits=2)
    assert not out[1].any()
    assert not out.isnan().any()


@BOTH
def test_bound_of_rows_beyond_those_in_use(attend: Attend) -> None:
    problem = tree_problem(AttentionShape(rows=(8, 2), lens=(40, 20), group=4), DEVICE)
    problem = replace(problem, max_rows=64)
    space = {"workspace": nan_space(problem, 4)} if attend is tree_attention else {}
    assert tree_error(problem, attend, **space) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("splits", [1, 3, None], ids=["one", "three", "two passes"])
def test_rows_of_an_earlier_wider_batch_stay_in_their_query(splits: int | None) -> None:
    # A graph of narrow queries is captured after vLLM's warm-up has run wide ones.
    problem = tree_problem(AttentionShape(rows=(4, 4, 4), lens=(40, 20, 70), group=2), DEVICE)
    tokens = len(problem.query)
    found = []
    for num_rows in (torch.full_like(problem.num_rows, 12), problem.num_rows):
        around = torch.full((3 * tokens, *problem.query.shape[1:]), UNTOUCHED, device=DEVICE)
        out = around[tokens : 2 * tokens]
        given = replace(problem, num_rows=num_rows)
        if splits is None:
            two_passes(given, out)
        else:
            tree_attention(given, out, workspace=nan_space(problem, 12), num_splits=splits)
        assert (around[:tokens] == UNTOUCHED).all()
        assert (around[2 * tokens :] == UNTOUCHED).all()
        found.append(out)
    assert torch.equal(*found)
    problem.num_rows.add_(8)
    assert tree_error(problem, workspace=nan_space(problem, 12)) < TOLERANCE[torch.float32]


DRAFTS = [
    (AttentionShape(rows=(), lens=(0,)), 1, 1, 0),
    (AttentionShape(rows=(), lens=(17, 0, 1), group=4), 4, 3, 2),
    (AttentionShape(rows=(), lens=(130,), kv_heads=2, head_size=80), 8, 6, 5),
    (AttentionShape(rows=(), lens=(33, 70), kv_heads=2, group=2, head_size=128), 10, 4, 1),
    (AttentionShape(rows=(), lens=(33, 7), group=2, dtype=torch.bfloat16), 8, 6, 3),
    (AttentionShape(rows=(), lens=(33, 7), group=2, dtype=torch.float16, fp8=True), 8, 6, 3),
    (AttentionShape(rows=(), lens=(50,), block_size=48, slots_first=True, fp8=True), 3, 5, 4),
]


@pytest.mark.parametrize(("draft", "splits"), crossed(DRAFTS, [1, 2]))
def test_draft_equals_reference(draft: tuple[AttentionShape, int, int, int], splits: int) -> None:
    shape, topk, steps, level = draft
    problem = draft_problem(shape, topk, steps, level, DEVICE)
    space = nan_space(problem, 12) if splits > 1 else None
    error = draft_error(problem, workspace=space, num_splits=splits)
    assert error < TOLERANCE[shape.dtype]


def test_draft_with_other_ancestors_differs() -> None:
    problem = draft_problem(AttentionShape(rows=(), lens=(20,)), 4, 3, 2, DEVICE)
    first, second = untouched(problem.query), untouched(problem.query)
    tree_attention(problem, first)
    others = (problem.ancestors // 4) * 4 + (problem.ancestors + 1) % 4
    tree_attention(replace(problem, ancestors=others), second)
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("head_size", [64, 80])
def test_write_scratch(head_size: int) -> None:
    wide = torch.randn(12, 6, head_size, device=DEVICE).to(torch.bfloat16)
    ours = torch.full((4, 15, 2, 2 * head_size), 9.0, dtype=torch.bfloat16, device=DEVICE)
    expected = ours.clone()
    for level in (0, 4):
        write_scratch(wide[:, 1:3], wide[:, 3:5], ours, level, num_reqs=3, topk=3)
        write_scratch_reference(wide[:, 1:3], wide[:, 3:5], expected, level, 3, 3)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("num_reqs", [1, 3, 16, 200, 256])
def test_splits_fit_the_workspace(num_reqs: int) -> None:
    space = AttentionWorkspace.allocate(256, 64, 32, 128, 32, "cpu")
    pairs = space.num_pairs(64, 32, 128)
    programs, room = 8 * num_reqs, min(space.max_splits, pairs // num_reqs)
    splits = split_count(programs, space.multiprocessors, 1 << 20, room, MIN_SPLIT_KEYS)
    assert 1 <= splits <= 32
    assert splits == 1 or num_reqs * splits <= pairs
    assert split_count(programs, space.multiprocessors, 100, room, MIN_SPLIT_KEYS) == 1
    assert space.acc.nbytes <= 32 << 20


def test_layers_of_other_sizes_share_a_workspace() -> None:
    space = AttentionWorkspace.allocate(2, 16, 8, 128, 8, DEVICE)
    for tensor in (space.acc, space.peak, space.total):
        tensor.fill_(float("nan"))
    assert space.num_pairs(16, 8, 128) == 16
    assert space.num_pairs(8, 8, 64) == 32
    assert space.num_pairs(16, 16, 256) == 4
    for shape in (
        AttentionShape(rows=(16, 3), lens=(150, 40), kv_heads=2, group=4, head_size=128),
        AttentionShape(rows=(5, 8), lens=(150, 40), kv_heads=1, group=3, head_size=256),
    ):
        problem = tree_problem(shape, DEVICE)
        assert tree_error(problem, workspace=space, num_splits=2) < TOLERANCE[torch.float32]


def test_refuses_what_does_not_fit() -> None:
    problem = tree_problem(AttentionShape(rows=(2,), lens=(9,)), DEVICE)
    out = untouched(problem.query)
    with pytest.raises(ValueError, match=r"dtype torch\.float16"):
        tree_attention(replace(problem, kv_cache=problem.kv_cache.half()), out)
    with pytest.raises(ValueError, match="does not fit a KV cache"):
        tree_attention(replace(problem, kv_cache=problem.kv_cache[..., :64]), out)
