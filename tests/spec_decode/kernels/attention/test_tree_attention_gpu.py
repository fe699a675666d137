"""The compiled kernels in bf16 against a float32 reference, eager and in replayed graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from tests.support.references.tree_reference import (
    draft_attention_reference,
    tree_attention_reference,
)
from tests.support.samples.attention_samples import draft_problem
from tests.support.samples.attention_spaces import nan_space, nans
from tests.support.watches.synchronisations import refused_synchronisations
from vllm_graft.spec_decode.kernels.attention.tree_attention import (
    draft_attention,
    tree_attention,
)
from vllm_graft.spec_decode.kernels.compact import TokenRows, follow_path
from vllm_graft.spec_decode.kernels.expand import expand_frontier, seed_frontier
from vllm_graft.spec_decode.kernels.finish import finish_tree
from vllm_graft.spec_decode.kernels.walk import walk_tree
from vllm_graft.spec_decode.targets.dense.samples import AttentionShape, tree_problem
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch
from vllm_graft.spec_decode.trees.candidates import CandidateTable
from vllm_graft.spec_decode.trees.topology import TreeState

pytestmark = pytest.mark.gpu

RELATIVE = 2e-2


def sample_shapes(count: int, seed: int) -> list[AttentionShape]:
    """Sample the matrix: batch 1-64, context 1-32k, rows 1-64, group 1-8, and layouts."""
    rng = random.Random(seed)
    shapes = []
    for _ in range(count):
        batch = rng.choice([1, 2, 5, 16, 64])
        context = rng.choice([1, 100, 1000, 8000, 32768 if batch <= 16 else 4000])
        most = rng.choice([1, 2, 16, 32, 64])
        rows = [rng.randint(0 if batch > 1 else 1, most) for _ in range(batch - 1)] + [most]
        shapes.append(
            AttentionShape(
                rows=tuple(rows),
                lens=tuple(max(r, 1) + 3 + rng.randint(0, context - 1) for r in rows),
                kv_heads=rng.choice([1, 2, 8]),
                group=rng.choice([1, 2, 3, 4, 8]),
                head_size=rng.choice([64, 128, 128, 256, 80]),
                block_size=rng.choice([16, 32, 48, 64, 128]),
                dtype=torch.bfloat16,
                fp8=rng.random() < 0.2,
                slots_first=rng.random() < 0.5,
                max_blocks=2048,
            )
        )
    return shapes


def label(shape: AttentionShape) -> str:
    return (
        f"b{len(shape.lens)}-r{max(shape.rows, default=0)}-n{max(shape.lens)}-h{shape.kv_heads}x"
        f"{shape.group}x{shape.head_size}-p{shape.block_size}{'-fp8' * shape.fp8}"
    )


def expected(problem: TreeBatch | DraftBatch) -> torch.Tensor:
    """Compute in float32 from the same bf16 or e4m3 inputs; NaN where nothing is computed."""
    if isinstance(problem, TreeBatch):
        out = nans(problem.query).float()
        tree_attention_reference(problem, out)
    else:
        out = nans(problem.query).float()
        draft_attention_reference(problem, out)
    return out


def check(out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Check that each row and head is right within 2e-2 of its norm."""
    skipped = wanted.isnan()
    assert torch.equal(out.isnan(), skipped)
    error = (out.float() - wanted).nan_to_num().norm(dim=-1)
    size = wanted.nan_to_num().norm(dim=-1)
    assert (error <= RELATIVE * size).all(), f"{(error / size).nan_to_num().max():.4f}"


def check_problem(problem: TreeBatch | DraftBatch) -> None:
    """Compare a kernel's result with the reference's; the workspace holds NaN before."""
    wanted = expected(problem)
    out = nans(problem.query)
    if isinstance(problem, TreeBatch):
        tree_attention(problem, out, workspace=nan_space(problem, 32))
    else:
        draft_attention(problem, out, workspace=nan_space(problem, 32))
    check(out, wanted)


@pytest.mark.parametrize("shape", sample_shapes(44, seed=0), ids=label)
def test_tree(shape: AttentionShape) -> None:
    check_problem(tree_problem(shape, "cuda"))


@pytest.mark.parametrize(
    ("topk", "steps", "level"), [(1, 4, 3), (4, 3, 0), (8, 6, 5), (10, 7, 3), (8, 6, 1)]
)
@pytest.mark.parametrize("shape", sample_shapes(3, seed=1), ids=label)
def test_draft(shape: AttentionShape, topk: int, steps: int, level: int) -> None:
    check_problem(draft_problem(shape, topk, steps, level, "cuda"))


def test_splits_agree() -> None:
    shape = AttentionShape(
        rows=(32, 9), lens=(5000, 40), kv_heads=2, group=4, head_size=128, dtype=torch.bfloat16
    )
    problem = tree_problem(shape, "cuda")
    wanted = expected(problem)
    for splits in (1, 2, 7, 32):
        out = nans(problem.query)
        tree_attention(problem, out, workspace=nan_space(problem, 64), num_splits=splits)
        check(out, wanted)


def test_without_the_mask_the_error_is_seen() -> None:
    shape = AttentionShape(rows=(32,), lens=(64,), head_size=128, dtype=torch.bfloat16)
    problem = tree_problem(shape, "cuda")
    wanted = expected(problem)
    problem.row_masks.fill_(-1)
    out = nans(problem.query)
    tree_attention(problem, out)
    with pytest.raises(AssertionError):
        check(out, wanted)


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture the call in a graph; it is compiled before."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


GRAPH_LENS = [(1000,) * 8, (40, 9000, 31, 100, 32768, 5000, 64, 35), (33,) * 8]


@pytest.mark.parametrize("group", [1, 4])
def test_tree_in_a_graph(group: int) -> None:
    def problem_of(lens: tuple[int, ...], rows: tuple[int, ...], seed: int) -> TreeBatch:
        shape = AttentionShape(
            rows=rows,
            lens=(*lens, 32768),
            kv_heads=2,
            group=group,
            head_size=128,
            dtype=torch.bfloat16,
            max_blocks=2048,
        )
        return replace(tree_problem(shape, "cuda", seed), max_seq_len=32768)

    rows = (32, 1, 7, 0, 32, 16, 32, 2, 32)
    problem = problem_of(GRAPH_LENS[0], rows, seed=0)
    out = nans(problem.query)
    workspace = nan_space(problem, 32)
    graph = captured(lambda: tree_attention(problem, out, workspace=workspace))
    # Later batches change lengths, pages, masks and rows, in the very tensors of the capture.
    others = [rows, (2, 32, 16, 32, 0, 7, 1, 32, 32), (0,) * 8 + (32,)]
    for step, (lens, rows_now) in enumerate(zip(GRAPH_LENS, others, strict=True)):
        new = problem_of(lens, rows_now, seed=step)
        for name in ("query_start_loc", "seq_lens", "block_table", "num_rows", "kv_cache"):
            getattr(problem, name).copy_(getattr(new, name))
        tokens = len(new.row_masks)
        problem.query[:tokens] = new.query[: len(problem.query)]
        problem.row_masks[:tokens] = new.row_masks[: len(problem.row_masks)]
        out.fill_(float("nan"))
        workspace.acc.fill_(float("nan"))
        graph.replay()
        check(out, expected(problem))


def test_draft_in_a_graph() -> None:
    def problem_of(lens: tuple[int, ...], seed: int) -> DraftBatch:
        shape = AttentionShape(
            rows=(), lens=(*lens, 32768), kv_heads=2, group=4, head_size=128, dtype=torch.bfloat16
        )
        problem = draft_problem(shape, 8, 6, 4, "cuda", seed)
        return replace(problem, max_seq_len=32768)

    problem = problem_of(GRAPH_LENS[0], seed=0)
    out, space = nans(problem.query), nan_space(problem, 32)
    graph = captured(lambda: draft_attention(problem, out, workspace=space))
    for step, lens in enumerate(GRAPH_LENS):
        new = problem_of(lens, seed=step)
        for field in fields(new):
            if isinstance(tensor := getattr(new, field.name), torch.Tensor):
                getattr(problem, field.name).copy_(tensor)
        out.fill_(float("nan"))
        space.acc.fill_(float("nan"))
        graph.replay()
        check(out, expected(problem))


def test_no_host_synchronisation() -> None:
    shape = AttentionShape(rows=(4, 8), lens=(400, 900), head_size=128, dtype=torch.bfloat16)
    tree = tree_problem(shape, "cuda")
    draft = draft_problem(shape, 4, 3, 1, "cuda")
    outs = nans(tree.query), nans(draft.query)
    spaces = nan_space(tree, 32), nan_space(draft, 32)
    table = CandidateTable.allocate(2, 4, 3, "cuda")
    topology = TreeState.allocate(2, 15, "cuda")
    logp = torch.rand(8, 4, device="cuda")
    tokens = torch.zeros(8, 4, dtype=torch.int64, device="cuda")
    flat = torch.zeros(64, dtype=torch.int64, device="cuda")
    slots = torch.arange(2, device="cuda")
    starts = torch.tensor([0, 16, 32], dtype=torch.int32, device="cuda")
    drafts = torch.full((2,), 15, dtype=torch.int32, device="cuda")
    path = torch.zeros(2, 16, dtype=torch.int32, device="cuda")
    count = torch.zeros(2, dtype=torch.int32, device="cuda")
    sampled = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
    chosen = torch.zeros(2, 15, dtype=torch.int64, device="cuda")
    states = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda")
    before = TokenRows(flat, flat, states)
    after = TokenRows(*(tensor.clone() for tensor in before))
    with refused_synchronisations():
        tree_attention(tree, outs[0], workspace=spaces[0])
        draft_attention(draft, outs[1], workspace=spaces[1])
        seed_frontier(table, logp[:2], tokens[:2], 2)
        for level in (1, 2):
            expand_frontier(table, level, logp, tokens, 2, flat, flat.clone())
        finish_tree(table, 2, 3, 15, slots, topology, chosen)
        walk_tree(flat[:32], flat[:32], starts, slots, topology, sampled, path, count)
        follow_path(
            path, count, starts, drafts, before, after, num_reqs=2, num_tokens=32, max_reqs=2
        )
    assert (count >= 1).all()
