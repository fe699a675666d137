"""Every plan computes what the references say, whatever it loads, keeps and leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.spec_decode.kernels.attention.test_tree_attention import (
    DEVICE,
    draft_error,
    tree_error,
)
from tests.support.samples.attention_samples import TOLERANCE, draft_problem, untouched
from tests.support.samples.attention_spaces import nan_space
from vllm_graft.spec_decode.kernels.attention import tree_attention as module
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Tile
from vllm_graft.spec_decode.kernels.attention.tree_attention import plan_of, tree_attention
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem
from vllm_graft.spec_decode.trees.batch import TreeBatch

TILE = Tile(32, 32, 4, 2)
PLANS = [
    Plan(TILE, ahead=True, edges=True),
    Plan(Tile(16, 16, 4, 1), 3, ahead=True),
    Plan(Tile(32, 16, 4, 2), 5, edges=True, skip_empty=True),
    Plan(TILE, 2, partials=torch.float16),
    Plan(TILE, 4, ahead=True, skip_empty=True, partials=torch.bfloat16, combine_width=32),
]
ROUNDED = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}
"""Largest error by the dtype of partial results, whose values reach 5."""

SHAPES = [
    AttentionShape(rows=(5, 0, 1), lens=(140, 9, 1), group=2),
    AttentionShape(rows=(20, 3), lens=(70, 257), kv_heads=2, group=3, block_size=48),
    AttentionShape(rows=(9, 16, 40), lens=(150, 17, 300), group=2, window=33, sinks=True),
    AttentionShape(rows=(9, 3), lens=(300, 150), group=2, window=140),
    AttentionShape(rows=(9, 16, 3), lens=(150, 17, 3), group=2, window=48, chunked=True),
    AttentionShape(rows=(8, 2), lens=(100, 33), group=2, head_size=80, sinks=True),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_equal_the_reference(shape: AttentionShape, plan: Plan) -> None:
    """Blocks before a window hold NaN, and so does the workspace."""
    problem = tree_problem(shape, DEVICE)
    error = tree_error(problem, workspace=nan_space(problem, 12), plan=plan)
    assert error < ROUNDED[plan.partials]


DRAFTS = [
    (AttentionShape(rows=(), lens=(17, 0, 200), group=4), 4, 3, 2),
    (AttentionShape(rows=(), lens=(130,), kv_heads=2, head_size=80, sinks=True), 8, 6, 5),
    (AttentionShape(rows=(), lens=(130, 40), group=2, window=50), 3, 5, 4),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("shape", "topk", "steps", "level"), DRAFTS, ids=str)
def test_drafts_equal_the_reference(
    shape: AttentionShape, topk: int, steps: int, level: int, plan: Plan
) -> None:
    problem = draft_problem(shape, topk, steps, level, DEVICE)
    error = draft_error(problem, workspace=nan_space(problem, 12), plan=plan)
    assert error < ROUNDED[plan.partials]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_size", [256, 512])
def test_wide_heads(head_size: int, fp8: bool) -> None:
    shape = AttentionShape(
        rows=(12, 5), lens=(200, 70), kv_heads=2, group=2, head_size=head_size, block_size=32,
        dtype=torch.bfloat16, fp8=fp8, window=50, sinks=True,
    )  # fmt: skip
    problem = tree_problem(shape, DEVICE)
    plan = Plan(
        Tile(32, 32, 8, 3),
        3,
        ahead=True,
        skip_empty=True,
        partials=torch.float16,
        combine_width=128,
    )
    error = tree_error(problem, workspace=nan_space(problem, 4), plan=plan)
    assert error < TOLERANCE[torch.bfloat16]


def test_bits_stay_where_nothing_rounds_otherwise() -> None:
    """What is loaded when, and which parts are read, changes no bit of an output."""
    problem = tree_problem(AttentionShape(rows=(9, 30), lens=(300, 40), group=2), DEVICE)
    found = []
    for plan in (
        Plan(TILE, 8),
        Plan(TILE, 8, ahead=True),
        Plan(TILE, 8, skip_empty=True, combine_warps=1),
        Plan(TILE, 8, combine_width=16),
    ):
        out = untouched(problem.query)
        tree_attention(problem, out, workspace=nan_space(problem, 12), plan=plan)
        found.append(out)
    assert all(torch.equal(found[0], each) for each in found[1:])
    # Negative control: another tile rounds otherwise.
    out = untouched(problem.query)
    tree_attention(problem, out, workspace=nan_space(problem, 12), plan=Plan(Tile(32, 16, 4, 1), 8))
    assert not torch.equal(found[0], out)


def test_windows_are_looked_at_near_their_edges() -> None:
    """The bits stay: nothing else than what all rows see is left unchecked."""
    shape = AttentionShape(rows=(9, 20), lens=(300, 200), group=2, window=120)
    problem = tree_problem(shape, DEVICE)

    def run(batch: TreeBatch, *, edges: bool) -> torch.Tensor:
        out = untouched(batch.query)
        tree_attention(batch, out, plan=Plan(Tile(32, 16, 4, 1), edges=edges))
        return out

    always = run(problem, edges=False)
    assert torch.equal(always, run(problem, edges=True))
    # Negative control: depths that the bound of the rows does not cover are not looked at.
    assert problem.row_depths is not None
    deep = replace(problem, row_depths=problem.row_depths + 60)
    assert not torch.equal(run(deep, edges=False), run(deep, edges=True))


def test_empty_splits_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only splits with keys do, and the kernel that combines has to know them."""
    problem = tree_problem(AttentionShape(rows=(4,), lens=(70,), group=2), DEVICE)

    def run(plan: Plan) -> tuple[torch.Tensor, AttentionWorkspace]:
        space, out = nan_space(problem, 12), untouched(problem.query)
        tree_attention(problem, out, workspace=space, plan=plan)
        return out, space

    out, space = run(Plan(TILE, 10, skip_empty=True))
    written = ~space.peak.view(-1, 4, 2)[:10].isnan().flatten(1).any(1)
    # 70 keys are three tiles of 32.
    assert written.tolist() == [True] * 3 + [False] * 7
    assert not out.isnan().any()
    _, space = run(Plan(TILE, 10))
    assert not space.peak.view(-1, 4, 2)[:10].isnan().any()
    # Negative control: read as if all had written, the output is what lies in memory.
    monkeypatch.setattr(module, "UsedSplits", lambda *_: None)
    out, _ = run(Plan(TILE, 10, skip_empty=True))
    assert out.isnan().all()


def test_rounded_results_are_rounded() -> None:
    """Negative control: narrower partial results do differ, by no more than their rounding."""
    problem = tree_problem(AttentionShape(rows=(9,), lens=(300,)), DEVICE)
    errors = [
        tree_error(problem, workspace=nan_space(problem, 4), plan=Plan(TILE, 4, partials=dtype))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert errors[0] < errors[1] < errors[2] < ROUNDED[torch.bfloat16]


def test_what_is_planned_is_what_is_computed() -> None:
    """A forced plan is checked, and forcing what would be planned changes nothing."""
    problem = tree_problem(AttentionShape(rows=(9, 4), lens=(900, 40), group=2), DEVICE)
    space = nan_space(problem, 12)
    plan = plan_of(problem, space)
    assert plan == Plan(plan.tile, plan.splits)
    assert plan.splits > 1
    first, second = untouched(problem.query), untouched(problem.query)
    tree_attention(problem, first, workspace=space)
    tree_attention(problem, second, workspace=space, plan=plan)
    assert torch.equal(first, second)
    assert plan_of(problem, None).splits == 1
    with pytest.raises(ValueError, match="do not fit a workspace with room for 24"):
        tree_attention(problem, first, workspace=space, plan=plan._replace(splits=13))
    draft = draft_problem(AttentionShape(rows=(), lens=(900,)), 4, 3, 2, DEVICE)
    longer = replace(draft, max_seq_len=1 << 20)
    space = nan_space(draft, 12)
    assert plan_of(longer, space).splits >= plan_of(draft, space).splits
