"""Plans of tree attention on a GPU: kernels that overlap, in replayed graphs, and rounding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.tree_reference import (
    draft_attention_reference,
    tree_attention_reference,
)
from tests.support.samples.attention_samples import draft_problem
from tests.support.samples.attention_spaces import check_rows, nan_space, nans
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Tile
from vllm_graft.spec_decode.kernels.attention.tree_attention import (
    draft_attention,
    plan_of,
    tree_attention,
)
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

pytestmark = pytest.mark.gpu

RELATIVE = 2e-2
PLANS = [
    Plan(Tile(32, 64, 4, 3), ahead=True, edges=True),
    Plan(Tile(32, 64, 4, 3), 5, ahead=True, skip_empty=True, combine_warps=1),
    Plan(Tile(64, 32, 8, 2), 3, ahead=True, edges=True, partials=torch.float16, combine_width=64),
    Plan(Tile(16, 128, 4, 1), 7, skip_empty=True, partials=torch.bfloat16),
]
SHAPES = [
    AttentionShape(rows=(8, 0, 5), lens=(2000, 3, 350), kv_heads=2, group=4, head_size=128),
    AttentionShape(
        rows=(32, 7), lens=(1500, 1200), kv_heads=2, group=2, head_size=256, window=1024
    ),
    AttentionShape(rows=(16, 3), lens=(700, 90), group=4, head_size=64, window=128, sinks=True),
]


def overlapping() -> bool:
    return torch.cuda.get_device_capability()[0] >= 9


def attend(
    problem: TreeBatch | DraftBatch, plan: Plan | None, max_splits: int = 16
) -> torch.Tensor:
    """The output; the workspace holds NaN before."""
    out, space = nans(problem.query), nan_space(problem, max_splits)
    if isinstance(problem, DraftBatch):
        draft_attention(problem, out, workspace=space, plan=plan)
    else:
        tree_attention(problem, out, workspace=space, plan=plan)
    return out


def check(problem: TreeBatch | DraftBatch, plan: Plan) -> None:
    wanted = nans(problem.query).float()
    if isinstance(problem, DraftBatch):
        draft_attention_reference(problem, wanted)
    else:
        tree_attention_reference(problem, wanted)
    found = attend(problem, plan)
    check_rows(found, wanted, RELATIVE)
    if plan.splits > 1 and overlapping():
        assert torch.equal(
            found.nan_to_num(), attend(problem, plan._replace(overlapped=True)).nan_to_num()
        )


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees(shape: AttentionShape, plan: Plan) -> None:
    shape = AttentionShape(**{**vars(shape), "dtype": torch.bfloat16})
    check(tree_problem(shape, "cuda"), plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_drafts(plan: Plan) -> None:
    shape = AttentionShape(
        rows=(), lens=(900, 0, 70), kv_heads=2, group=4, head_size=128, dtype=torch.bfloat16
    )
    check(draft_problem(shape, 8, 6, 4, "cuda"), plan)


CHOSEN = [
    AttentionShape(rows=(8,) * 16, lens=(350,) * 16, kv_heads=8, group=4, head_size=128),
    AttentionShape(rows=(4,) * 64, lens=(90,) * 64, kv_heads=8, group=4, head_size=128),
    AttentionShape(rows=(32,), lens=(2000,), kv_heads=8, group=4, head_size=128, fp8=True),
    AttentionShape(rows=(32,) * 32, lens=(300,) * 32, kv_heads=8, group=4, head_size=128),
    AttentionShape(
        rows=(32,) * 16, lens=(2000,) * 16, kv_heads=4, group=2, head_size=256, window=1024
    ),
    AttentionShape(rows=(8,), lens=(1900,), kv_heads=4, group=2, head_size=256, window=1024),
    AttentionShape(rows=(32, 5), lens=(1900, 70), kv_heads=2, group=4, head_size=512),
    AttentionShape(rows=(8, 3), lens=(900, 70), kv_heads=2, group=4, head_size=512, fp8=True),
    AttentionShape(
        rows=(16,), lens=(700,), kv_heads=8, group=8, head_size=64, window=128, sinks=True
    ),
    AttentionShape(rows=(9, 16), lens=(900, 17), kv_heads=2, group=4, window=48, chunked=True),
]


@pytest.mark.parametrize("shape", CHOSEN, ids=str)
def test_what_the_rule_chooses(shape: AttentionShape) -> None:
    problem = tree_problem(replace(shape, dtype=torch.bfloat16), "cuda")
    check_chosen(replace(problem, max_seq_len=32768))


@pytest.mark.parametrize(("num_reqs", "topk"), [(1, 8), (4, 8), (16, 4), (64, 2)])
@pytest.mark.parametrize("head_size", [128, 256])
def test_what_the_rule_chooses_for_drafts(num_reqs: int, topk: int, head_size: int) -> None:
    lens = (900,) + (70,) * (num_reqs - 1)
    shape = AttentionShape(
        rows=(), lens=lens, kv_heads=8, group=4, head_size=head_size, dtype=torch.bfloat16
    )
    check_chosen(replace(draft_problem(shape, topk, 6, 4, "cuda"), max_seq_len=32768))


def check_chosen(problem: TreeBatch | DraftBatch) -> None:
    """Nothing is forced."""
    plan = plan_of(problem, nan_space(problem, 64))
    assert plan.overlapped == (plan.splits > 1 and overlapping())
    wanted = nans(problem.query).float()
    if isinstance(problem, DraftBatch):
        draft_attention_reference(problem, wanted)
    else:
        tree_attention_reference(problem, wanted)
    check_rows(attend(problem, None, 64), wanted, RELATIVE)


@pytest.mark.parametrize("rows", [(8,) * 4, (8, 0, 3, 0), (0,) * 3 + (1,)])
def test_what_overlaps_in_a_graph_reads_what_was_written(rows: tuple[int, ...]) -> None:
    """Each replay's splits find NaN; a kernel that did not wait for them would combine that."""
    if not overlapping():
        pytest.skip("kernels overlap from sm_90 on")
    shape = AttentionShape(
        rows=rows, lens=(5000, 70, 350, 2000), kv_heads=8, group=4, head_size=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    problem = tree_problem(shape, "cuda")
    plan = Plan(
        Tile(32, 64, 4, 3), 12, ahead=True, skip_empty=True, combine_warps=1, overlapped=True
    )
    wanted = attend(problem, plan._replace(overlapped=False)).nan_to_num()
    out, space = nans(problem.query), nan_space(problem, 16)
    tree_attention(problem, out, workspace=space, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            # What follows the kernel that combines must not come before the splits' end.
            space.acc.fill_(float("nan"))
            space.peak.fill_(float("nan"))
            out.fill_(float("nan"))
            tree_attention(problem, out, workspace=space, plan=plan)
    for _ in range(50):
        graph.replay()
        assert torch.equal(out.nan_to_num(), wanted)
