"""The compiled kernels against a float32 reference, eager and replayed, by any plan."""

import random
from dataclasses import fields, replace

import pytest
import torch

from tests.support.samples.attention_samples import AttentionShape, draft_problem, tree_problem
from tests.support.samples.attention_spaces import (
    attend,
    captured,
    check_rows,
    nan_space,
    nans,
    wanted_of,
)
from tests.support.watches import refused_synchronisations
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Tile
from vllm_graft.spec_decode.kernels.attention.tree_attention import plan_of, tree_attention
from vllm_graft.spec_decode.kernels.candidates import expand_frontier, finish_tree, seed_frontier
from vllm_graft.spec_decode.kernels.compact import TokenRows, follow_path
from vllm_graft.spec_decode.kernels.verify import walk_tree
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeState

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


def windowed(count: int, seed: int) -> list[AttentionShape]:
    rng = random.Random(seed)
    return [
        replace(shape, window=rng.choice([1, 17, 128, 1024, 4096]), sinks=rng.random() < 0.5)
        for shape in sample_shapes(count, seed)
    ]


def label(value: AttentionShape | int) -> str:
    if isinstance(value, int):
        return str(value)
    kind = "c" if value.chunked else "w"
    return (
        f"b{len(value.lens)}-r{max(value.rows, default=0)}-n{max(value.lens)}-h{value.kv_heads}x"
        f"{value.group}x{value.head_size}-p{value.block_size}{'-fp8' * value.fp8}"
        f"{f'-{kind}{value.window}' if value.window else ''}{'-sinks' * value.sinks}"
    )


GEMMA = AttentionShape(
    rows=(64, 7, 0, 1), lens=(5000, 1030, 3, 1), kv_heads=2, group=2, head_size=512, block_size=32,
    dtype=torch.bfloat16, window=1024,
)  # fmt: skip
TREES = [
    *sample_shapes(44, seed=0),
    *windowed(16, seed=5),
    GEMMA,
    *(replace(shape, chunked=True) for shape in windowed(12, seed=7)),
]
DRAFTS = [
    *((shape, *level)
      for shape in sample_shapes(3, seed=1)
      for level in [(1, 4, 3), (4, 3, 0), (8, 6, 5), (10, 7, 3), (8, 6, 1)]),
    *((replace(shape, window=max(8, shape.window)), 8, 6, level)
      for shape in windowed(6, seed=6)
      for level in (0, 4)),
]  # fmt: skip


def check_problem(problem: TreeBatch | DraftBatch) -> None:
    check_rows(attend(problem, 32), wanted_of(problem), RELATIVE)


@pytest.mark.parametrize("shape", TREES, ids=label)
def test_tree(shape: AttentionShape) -> None:
    check_problem(tree_problem(shape, "cuda"))


@pytest.mark.parametrize(("shape", "topk", "steps", "level"), DRAFTS, ids=label)
def test_draft(shape: AttentionShape, topk: int, steps: int, level: int) -> None:
    check_problem(draft_problem(shape, topk, steps, level, "cuda"))


def test_splits_agree() -> None:
    shape = AttentionShape(
        rows=(32, 9), lens=(5000, 40), kv_heads=2, group=4, head_size=128, dtype=torch.bfloat16
    )
    problem = tree_problem(shape, "cuda")
    wanted = wanted_of(problem)
    for splits in (1, 2, 7, 32):
        check_rows(attend(problem, 64, num_splits=splits), wanted, RELATIVE)


def test_without_the_mask_the_error_is_seen() -> None:
    shape = AttentionShape(rows=(32,), lens=(64,), head_size=128, dtype=torch.bfloat16)
    problem = tree_problem(shape, "cuda")
    wanted = wanted_of(problem)
    problem.row_masks.fill_(-1)
    out = nans(problem.query)
    tree_attention(problem, out)
    with pytest.raises(AssertionError):
        check_rows(out, wanted, RELATIVE)


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
        check_rows(out, wanted_of(problem), RELATIVE)


def test_draft_in_a_graph() -> None:
    def problem_of(lens: tuple[int, ...], seed: int) -> DraftBatch:
        shape = AttentionShape(
            rows=(), lens=(*lens, 32768), kv_heads=2, group=4, head_size=128, dtype=torch.bfloat16
        )
        problem = draft_problem(shape, 8, 6, 4, "cuda", seed)
        return replace(problem, max_seq_len=32768)

    problem = problem_of(GRAPH_LENS[0], seed=0)
    out, space = nans(problem.query), nan_space(problem, 32)
    graph = captured(lambda: tree_attention(problem, out, workspace=space))
    for step, lens in enumerate(GRAPH_LENS):
        new = problem_of(lens, seed=step)
        for field in fields(new):
            if isinstance(tensor := getattr(new, field.name), torch.Tensor):
                getattr(problem, field.name).copy_(tensor)
        out.fill_(float("nan"))
        space.acc.fill_(float("nan"))
        graph.replay()
        check_rows(out, wanted_of(problem), RELATIVE)


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
        tree_attention(draft, outs[1], workspace=spaces[1])
        seed_frontier(table, logp[:2], tokens[:2], 2)
        for level in (1, 2):
            expand_frontier(table, level, logp, tokens, 2, flat, flat.clone())
        finish_tree(table, 2, 3, 15, slots, topology, chosen)
        walk_tree(flat[:32], flat[:32], starts, slots, topology, sampled, path, count)
        follow_path(
            path, count, starts, drafts, before, after, num_reqs=2, num_tokens=32, max_reqs=2
        )
    assert (count >= 1).all()


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
        check_rows(out, wanted_of(new), RELATIVE)


PLANS = [
    Plan(Tile(32, 64, 4, 3), ahead=True, edges=True),
    Plan(Tile(32, 64, 4, 3), 5, ahead=True, skip_empty=True, combine_warps=1),
    Plan(Tile(64, 32, 8, 2), 3, ahead=True, edges=True, combine_width=64),
    Plan(Tile(16, 128, 4, 1), 7, skip_empty=True),
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


def check(problem: TreeBatch | DraftBatch, plan: Plan) -> None:
    found = attend(problem, 16, plan=plan)
    check_rows(found, wanted_of(problem), RELATIVE)
    if plan.splits > 1 and overlapping():
        other = attend(problem, 16, plan=plan._replace(overlapped=True))
        assert torch.equal(found.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_planned_trees(shape: AttentionShape, plan: Plan) -> None:
    shape = AttentionShape(**{**vars(shape), "dtype": torch.bfloat16})
    check(tree_problem(shape, "cuda"), plan)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_planned_drafts(plan: Plan) -> None:
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
    check_rows(attend(problem, 64), wanted_of(problem), RELATIVE)


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
    wanted = attend(problem, 16, plan=plan._replace(overlapped=False)).nan_to_num()
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
