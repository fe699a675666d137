"""Every plan computes what the references say; what the rule chooses."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.spec_decode.kernels.attention.test_tree_attention import DEVICE, draft_error, tree_error
from tests.support.crossed import crossed
from tests.support.samples.attention_samples import (
    TOLERANCE,
    AttentionShape,
    draft_problem,
    tree_problem,
    untouched,
)
from tests.support.samples.attention_spaces import nan_space
from vllm_graft.spec_decode.kernels.attention import attention_plan
from vllm_graft.spec_decode.kernels.attention import tree_attention as module
from vllm_graft.spec_decode.kernels.attention.attention_plan import (
    AttentionWorkspace,
    Plan,
    Sizes,
    Tile,
    choose_plan,
    combine_warps,
    shared_bytes,
)
from vllm_graft.spec_decode.kernels.attention.tree_attention import plan_of, tree_attention
from vllm_graft.spec_decode.kernels.kernel_launch import Launch, listing
from vllm_graft.spec_decode.startup.ahead import fingerprint
from vllm_graft.spec_decode.trees.batch import TreeBatch

TILE = Tile(32, 32, 4, 2)
PLANS = [
    Plan(TILE, ahead=True, edges=True),
    Plan(Tile(16, 16, 4, 1), 3, ahead=True),
    Plan(Tile(32, 16, 4, 2), 5, edges=True, skip_empty=True),
    Plan(TILE, 2),
    Plan(TILE, 4, ahead=True, skip_empty=True, combine_width=32),
]
ROUNDED = 1e-5
"""Largest error of values that reach 5."""

SHAPES = [
    AttentionShape(rows=(5, 0, 1), lens=(140, 9, 1), group=2),
    AttentionShape(rows=(20, 3), lens=(70, 257), kv_heads=2, group=3, block_size=48),
    AttentionShape(rows=(9, 16, 40), lens=(150, 17, 300), group=2, window=33, sinks=True),
    AttentionShape(rows=(9, 3), lens=(300, 150), group=2, window=140),
    AttentionShape(rows=(9, 16, 3), lens=(150, 17, 3), group=2, window=48, chunked=True),
    AttentionShape(rows=(8, 2), lens=(100, 33), group=2, head_size=80, sinks=True),
]


@pytest.mark.parametrize(("shape", "plan"), crossed(SHAPES, PLANS, every=3))
def test_trees_equal_the_reference(shape: AttentionShape, plan: Plan) -> None:
    """Blocks before a window hold NaN, and so does the workspace."""
    problem = tree_problem(shape, DEVICE)
    error = tree_error(problem, workspace=nan_space(problem, 12), plan=plan)
    assert error < ROUNDED


DRAFTS = [
    (AttentionShape(rows=(), lens=(17, 0, 200), group=4), 4, 3, 2),
    (AttentionShape(rows=(), lens=(130,), kv_heads=2, head_size=80, sinks=True), 8, 6, 5),
    (AttentionShape(rows=(), lens=(130, 40), group=2, window=50), 3, 5, 4),
]


@pytest.mark.parametrize(("draft", "plan"), crossed(DRAFTS, PLANS, every=3))
def test_drafts_equal_the_reference(
    draft: tuple[AttentionShape, int, int, int], plan: Plan
) -> None:
    shape, topk, steps, level = draft
    problem = draft_problem(shape, topk, steps, level, DEVICE)
    error = draft_error(problem, workspace=nan_space(problem, 12), plan=plan)
    assert error < ROUNDED


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_size", [256, 512])
def test_wide_heads(head_size: int, fp8: bool) -> None:
    shape = AttentionShape(
        rows=(12, 5), lens=(200, 70), kv_heads=2, group=2, head_size=head_size, block_size=32,
        dtype=torch.bfloat16, fp8=fp8, window=50, sinks=True,
    )  # fmt: skip
    problem = tree_problem(shape, DEVICE)
    plan = Plan(Tile(32, 32, 8, 3), 3, ahead=True, skip_empty=True, combine_width=128)
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


def test_what_is_planned_is_what_is_computed() -> None:
    """Forcing what would be planned changes nothing."""
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
    draft = draft_problem(AttentionShape(rows=(), lens=(900,)), 4, 3, 2, DEVICE)
    longer = replace(draft, max_seq_len=1 << 20)
    space = nan_space(draft, 12)
    assert plan_of(longer, space).splits >= plan_of(draft, space).splits


H200 = {"multiprocessors": 132, "capability": (9, 0), "most_splits": 64}


def sizes(
    rows: int, head: int, num_reqs: int, kv_heads: int = 8, keys: int = 4096, **kinds: bool
) -> Sizes:
    """Sizes of a launch on an H200."""
    return Sizes(rows, head, torch.bfloat16, num_reqs, kv_heads, keys, **kinds, **H200)  # type: ignore[arg-type]


def all_sizes() -> Iterator[Sizes]:
    for rows, head, num_reqs, kv_heads, keys in product(
        (1, 8, 32, 128, 512), (64, 128, 256, 512), (1, 4, 16, 256), (1, 8), (1, 1056, 131072)
    ):
        for window, draft, mixed in ((0, 0, 0), (1, 0, 1), (0, 1, 0), (1, 1, 0)):
            kinds = {"window": bool(window), "draft": bool(draft), "mixed": bool(mixed)}
            yield sizes(rows, head, num_reqs, kv_heads, keys, **kinds)


def test_plans_are_those_that_were_fastest() -> None:
    """A few launches of the search at commit d3db87d."""
    split = {"ahead": True, "skip_empty": True, "overlapped": True, "combine_width": 128}

    def plan(tile: Tile, splits: int, warps: int = 1, *, edges: bool = False) -> Plan:
        return Plan(tile, splits, edges=edges, combine_warps=warps, **split)  # type: ignore[arg-type]

    assert choose_plan(sizes(32, 128, 16)) == Plan(Tile(32, 64, 4, 3), ahead=True)
    assert choose_plan(sizes(32, 128, 4)) == plan(Tile(32, 32, 4, 3), 4)
    assert choose_plan(sizes(128, 128, 1)) == plan(Tile(64, 64, 4, 3), 8)
    assert choose_plan(sizes(128, 128, 1, keys=32768)) == plan(Tile(64, 64, 4, 3), 16)
    windows = sizes(64, 256, 16, 4, 1056, window=True)
    assert choose_plan(windows) == plan(Tile(64, 32, 4, 3), 2, edges=True)
    assert choose_plan(windows._replace(num_reqs=1)) == plan(Tile(64, 32, 4, 3), 33, 4, edges=True)
    assert choose_plan(sizes(128, 512, 4, 2)) == plan(Tile(64, 32, 8, 2), 8)
    level = choose_plan(sizes(32, 128, 1, draft=True))
    assert level == plan(Tile(32, 64, 4, 1), 16)._replace(ahead=False)


def test_plans_fit_registers_memory_and_the_workspace() -> None:
    for each in all_sizes():
        plan = choose_plan(each)
        tile = plan.tile
        assert shared_bytes(tile, each.head) <= 220 << 10, each
        # So many numbers of the accumulator has a thread; a kernel that combines has as many.
        assert tile.rows * each.head <= 128 * 32 * tile.warps, each
        assert 1 <= plan.splits <= 64, each
        if plan.splits > 1:
            parts = 1 << (plan.splits - 1).bit_length()
            assert plan.combine_width <= 128
            assert parts * plan.combine_width <= 64 * 32 * plan.combine_warps
            assert plan.overlapped
            assert plan.skip_empty
        else:
            assert not plan.overlapped
        assert choose_plan(each._replace(most_splits=1)).splits == 1
        assert choose_plan(each._replace(most_splits=3)).splits <= 3
    # Negative control: what would not fit is seen.
    assert shared_bytes(Tile(64, 64, 4, 3), 512) > 220 << 10
    assert combine_warps(33, 128) * 64 * 32 == 64 * 128


@pytest.mark.parametrize(
    "other",
    [{"capability": (8, 0)}, {"capability": (12, 0)}, {"capability": (0, 0)},
     {"dtype": torch.float32}],
    ids=str,
)  # fmt: skip
def test_elsewhere_programs_load_as_before(other: dict[str, object]) -> None:
    """The options that only these devices gain by are off, one and all."""
    for each in all_sizes():
        plan = choose_plan(each._replace(**other))  # type: ignore[arg-type]
        assert plan == Plan(plan.tile, plan.splits)
        assert plan.tile.stages <= 2
    # Negative control.
    assert choose_plan(sizes(128, 128, 1)).overlapped
    assert choose_plan(sizes(128, 128, 1)._replace(capability=(10, 3))).overlapped


def test_a_forced_number_of_splits_stays() -> None:
    for splits in (1, 2, 5):
        plan = choose_plan(sizes(128, 128, 1), splits)
        assert plan.splits == splits
        assert plan.overlapped == (splits > 1)


def test_splits_are_bounded_by_memory_that_does_not_grow() -> None:
    """The rule's splits fit the workspace of an engine, whose size no rule changes."""
    space = AttentionWorkspace.allocate(256, 32, 32, 128, 64, "meta")
    space = replace(space, multiprocessors=132, capability=(9, 0))
    for rows, num_reqs in product((4, 8, 16, 32), (1, 4, 16, 64)):
        room = space.num_pairs(rows, 32, 128) // num_reqs
        found = choose_plan(sizes(rows * 4, 128, num_reqs)._replace(most_splits=max(room, 1)))
        assert found.splits * num_reqs <= space.num_pairs(rows, 32, 128) or found.splits == 1


def test_a_start_foretells_what_the_rule_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace on ``meta`` stands for the process's device, in what is listed and compiled."""
    problem = tree_problem(replace(TREES[0], dtype=torch.bfloat16), DEVICE)
    problem = replace(problem, max_seq_len=4096)

    def listed() -> list[Launch]:
        found: list[Launch] = []
        space = AttentionWorkspace.allocate(3, 8, 8, 128, 64, "meta")
        with listing(found.append):
            tree_attention(problem, torch.empty_like(problem.query), workspace=space)
        return found

    plain = listed()
    monkeypatch.setattr(attention_plan, "_device_of", lambda device: (132, (9, 0)))
    split, combine = listed()
    assert dict(split.arguments)["AHEAD"]
    assert dict(split.arguments)["OVERLAPPED"]
    assert dict(split.options) == {"num_warps": 4, "num_stages": 3}
    assert dict(combine.options) == {"num_warps": 2, "launch_pdl": True}
    # Negative control: on another device, other kernels are compiled, and remembered as such.
    target = ("cuda", 90, 32)
    assert fingerprint(plain, target) != fingerprint([split, combine], target)
    assert not any(dict(each.arguments)["OVERLAPPED"] for each in plain)


def chosen(problem: object, keys: int) -> Plan:
    """What the rule takes for a batch on an H200, as far as the interpreter can run it."""
    longer = replace(problem, max_seq_len=keys)  # type: ignore[type-var]
    space = nan_space(longer, 64)  # type: ignore[type-var]
    found = plan_of(longer, replace(space, multiprocessors=132, capability=(9, 0)))
    return found._replace(overlapped=False)


TREES = [
    AttentionShape(rows=(8, 0, 5), lens=(350, 3, 70), kv_heads=2, group=4, head_size=128),
    AttentionShape(rows=(12,), lens=(150,), group=4, head_size=64, window=64, sinks=True),
    AttentionShape(rows=(32, 7), lens=(300, 40), group=2, head_size=256, window=140),
    AttentionShape(rows=(9, 16, 3), lens=(150, 17, 3), group=2, window=48, chunked=True),
    AttentionShape(rows=(9, 2), lens=(150, 33), group=2, head_size=256, fp8=True),
    AttentionShape(rows=(17,), lens=(90,), group=4, head_size=512, sinks=True),
]


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_chosen_trees_equal_the_reference(shape: AttentionShape) -> None:
    """Blocks before a window hold NaN, and so does the workspace."""
    problem = tree_problem(replace(shape, dtype=torch.bfloat16), DEVICE)
    plan = chosen(problem, 4096)
    assert plan.ahead
    assert plan.skip_empty
    assert plan.splits > 1
    assert plan.edges == (shape.window > 0)
    error = tree_error(problem, workspace=nan_space(problem, 64), plan=plan)
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(
    ("shape", "topk"),
    [(AttentionShape(rows=(), lens=(17, 0, 200), group=4, head_size=128), 4),
     (AttentionShape(rows=(), lens=(130, 40), group=2, head_size=80, window=50, sinks=True), 3)],
    ids=str,
)  # fmt: skip
def test_chosen_drafts_equal_the_reference(shape: AttentionShape, topk: int, splits: int) -> None:
    problem = draft_problem(replace(shape, dtype=torch.bfloat16), topk, 3, 2, DEVICE)
    large = sizes(topk * shape.group, 128, len(shape.lens), window=shape.window > 0, draft=True)
    plan = choose_plan(large, splits)._replace(overlapped=False)
    assert plan.skip_empty == (splits > 1)
    error = draft_error(problem, workspace=nan_space(problem, 12), plan=plan)
    assert error < TOLERANCE[torch.bfloat16]
