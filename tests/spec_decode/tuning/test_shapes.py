"""Shapes of trees by number of nodes, and the ladders of dense drafts and of experts."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base.errors import HookError
from vllm_graft.spec_decode.config.tree_config import MAX_NODES, TreeConfig
from vllm_graft.spec_decode.trees.tree import TreeShape, num_candidates
from vllm_graft.spec_decode.tuning import scheduling
from vllm_graft.spec_decode.tuning.shapes import (
    DENSE,
    NARROW,
    Ladder,
    auto_schedule,
    dynamic,
    for_blocks,
    for_experts,
    whole,
)


@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 5), (3, 1), (4, 4), (8, 6)])
def test_the_candidates_are_those_that_are_scored(topk: int, steps: int) -> None:
    shape = TreeShape(topk, steps, 1)
    # The first level has topk nodes; the topk best of a level get topk children each.
    count = len([None for _ in range(topk)] + [None] * sum(topk * topk for _ in range(1, steps)))
    assert shape.num_candidates == count
    assert num_candidates(topk, steps) == count
    assert TreeConfig(topk=topk, steps=steps).num_candidates == count


def test_dynamic_takes_the_configured_bounds() -> None:
    assert dynamic(TreeConfig(topk=5, steps=3), 17) == TreeShape(5, 3, 17)
    assert dynamic(TreeConfig(topk=5, steps=3), 4) == TreeShape(4, 3, 4)
    assert dynamic(TreeConfig(topk=5, steps=3), 2) == TreeShape(2, 2, 2)


@pytest.mark.parametrize(
    ("topk", "steps", "nodes"), [(8, 6, 47), (8, 6, 31), (4, 3, 20), (1, 4, 4), (8, 6, 63)]
)
@pytest.mark.parametrize("max_num_seqs", [9, 10, 64, 1024])
def test_auto_stays_within_its_bounds(topk: int, steps: int, nodes: int, max_num_seqs: int) -> None:
    config = TreeConfig(topk=topk, steps=steps, shape="auto")
    schedule = auto_schedule(config, nodes, max_num_seqs)
    # vLLM's schedule must have no gaps and ever fewer nodes. Each number has a batch.
    assert all(first <= last for first, last, _ in schedule)
    assert schedule[-1][1] == max_num_seqs
    assert [first for first, _, _ in schedule] == [1, *(last + 1 for _, last, _ in schedule[:-1])]
    numbers = [count for _, _, count in schedule]
    assert numbers == sorted(set(numbers), reverse=True)
    assert numbers[0] == nodes
    assert numbers[-1] == 0 or len(numbers) == max_num_seqs
    for count in numbers:
        if count == 0:
            continue
        shape = dynamic(config, count)
        assert shape.num_nodes == count <= shape.num_candidates
        assert shape.topk <= topk
        assert shape.steps <= steps


def test_auto_offers_width_and_depth() -> None:
    config = TreeConfig(shape="auto")
    shapes = [dynamic(config, nodes) for _, _, nodes in auto_schedule(config, 47, 256)[:-1]]
    assert TreeShape(8, 5, 30) in shapes
    assert TreeShape(4, 6, 31) in shapes
    assert TreeShape(8, 6, 47) in shapes
    assert TreeShape(1, 1, 1) in shapes
    assert len(shapes) == 10
    deep = TreeConfig(shape="auto", steps=12)
    assert dynamic(deep, 31) == TreeShape(4, 12, 31)
    # The widest shape is no deeper than pays, but deep enough for its nodes.
    assert dynamic(deep, 47) == TreeShape(8, 7, 47)
    assert dynamic(TreeConfig(shape="auto", topk=2, steps=12), 40) == TreeShape(2, 11, 40)
    # There are no more numbers than batches: the widest ones stay.
    assert auto_schedule(config, 47, 2) == [(1, 1, 47), (2, 2, 31)]


@pytest.mark.parametrize(
    ("max_num_seqs", "numbers"),
    [(1, [6]), (2, [15, 2]), (4, [31, 7, 5, 1]), (10, [63, 31, 15, 14, 7, 5, 3, 2, 1, 0])],
)
def test_few_batches_share_all_of_a_narrow_ladder(max_num_seqs: int, numbers: list[int]) -> None:
    """A few nodes may pay for one request where there are experts, and many for none."""
    config = TreeConfig(shape="auto", topk=8, steps=12)
    schedule = auto_schedule(config, 63, max_num_seqs, NARROW)
    assert [nodes for *_, nodes in schedule] == numbers
    assert schedule[-1][1] == max_num_seqs
    whole_ladder = auto_schedule(config, 63, 256, NARROW)
    assert [nodes for *_, nodes in whole_ladder] == [63, 31, 15, 14, 7, 6, 5, 3, 2, 1, 0]


def test_blocks_are_whole_where_trees_are_large() -> None:
    """What one or four requests may get is what they got before; more requests get less."""
    config = TreeConfig(shape="auto", steps=7)
    numbers = [nodes for _, _, nodes in auto_schedule(config, 63, 256)[:-1]]
    shapes = {nodes: for_blocks(config, nodes) for nodes in numbers}
    assert {shapes[nodes] for nodes in (30, 31, 63)} == {
        TreeShape(8, 7, nodes) for nodes in (30, 31, 63)
    }
    assert (shapes[14], shapes[15]) == (TreeShape(8, 4, 14), TreeShape(4, 7, 15))
    assert (shapes[7], shapes[6]) == (TreeShape(4, 7, 7), TreeShape(4, 4, 6))
    assert (shapes[3], shapes[1]) == (TreeShape(2, 3, 3), TreeShape(1, 1, 1))
    # A number that the user has chosen loses nothing.
    fixed = TreeConfig(steps=7)
    for nodes in range(1, 64):
        assert for_blocks(fixed, nodes) == whole(fixed, nodes) == dynamic(fixed, nodes)


def test_whole_ignores_that_the_shape_is_auto() -> None:
    config = TreeConfig(shape="auto", steps=7)
    assert whole(config, 7) == TreeShape(7, 7, 7) != dynamic(config, 7)
    assert whole(config, 15) == TreeShape(8, 7, 15) != dynamic(config, 15)


def eagle2(topk: int, steps: int, nodes: int, seed: int) -> list[tuple[int, ...]]:
    """Return the best `nodes` paths, best first: `topk` frontier nodes, `topk` children each."""

    def children(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...]]]:
        chance = random.Random(f"{seed} {path}")
        best = sorted((score - chance.expovariate(1.0) for _ in range(20)), reverse=True)
        return [(child, (*path, i)) for i, child in enumerate(best[:topk])]

    frontier = [(0.0, ())]
    scored = []
    for _ in range(steps):
        level = [found for score, path in frontier for found in children(path, score)]
        scored += level
        frontier = sorted(level, reverse=True)[:topk]
    return [path for _, path in sorted(scored, reverse=True)[:nodes]]


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 7, 12])
def test_trees_of_few_nodes_lose_nothing_by_a_narrower_draft(nodes: int) -> None:
    narrow = dynamic(TreeConfig(topk=8, steps=6), nodes)
    for seed in range(50):
        wide = eagle2(8, 6, nodes, seed)
        assert eagle2(narrow.topk, narrow.steps, nodes, seed) == wide


def test_a_draft_narrower_than_its_tree_loses_nodes() -> None:
    assert any(eagle2(1, 6, 2, seed) != eagle2(8, 6, 2, seed) for seed in range(50))


def shapes(ladder: Ladder, config: TreeConfig, nodes: int) -> list[TreeShape]:
    return [shape for shape, _ in ladder.within(config, nodes)]


def rows(shape: TreeShape) -> int:
    return shape.topk * (min(shape.steps, shape.num_nodes) - 1)


@pytest.mark.parametrize("ladder", [DENSE, NARROW])
def test_each_number_has_one_rung_and_ever_smaller_batches(ladder: Ladder) -> None:
    numbers = [rung.nodes for rung in ladder.rungs]
    assert numbers == sorted(set(numbers))
    batches = [rung.batch for rung in ladder.rungs]
    assert batches == sorted(set(batches), reverse=True)


@pytest.mark.parametrize("ladder", [DENSE, NARROW])
@pytest.mark.parametrize("topk", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("steps", [1, 2, 4, 7, 12, 32])
def test_every_number_fits_its_shape_and_the_bounds(ladder: Ladder, topk: int, steps: int) -> None:
    config = TreeConfig(topk=topk, steps=steps, shape="auto")
    for nodes in range(1, min(config.num_candidates, MAX_NODES) + 1):
        found = shapes(ladder, config, nodes)
        numbers = [shape.num_nodes for shape in found]
        assert numbers == sorted(set(numbers))
        assert numbers[-1] == nodes
        for shape in found:
            assert shape.num_nodes <= shape.num_candidates
            assert shape.topk <= topk
            assert shape.steps <= steps


def test_few_nodes_come_from_narrow_levels() -> None:
    config = TreeConfig(topk=8, steps=8, shape="auto")
    found = shapes(NARROW, config, 63)
    assert found[:4] == [TreeShape(1, nodes, nodes) for nodes in (1, 2, 3, 5)]
    assert found[4:8] == [
        TreeShape(2, 3, 6),
        TreeShape(1, 7, 7),
        TreeShape(3, 4, 14),
        TreeShape(2, 8, 15),
    ]
    for nodes in (3, 6, 7, 14, 15):
        assert rows(for_experts(config, nodes)) < rows(dynamic(config, nodes))
    # A number of the user's own is as wide as the next larger rung; a dense draft's is wide.
    assert for_experts(config, 4) == TreeShape(1, 4, 4)
    assert for_experts(config, 10) == TreeShape(3, 4, 10)
    assert for_experts(config, 47) == TreeShape(8, 7, 47)
    assert dynamic(config, 10) == TreeShape(8, 7, 10)
    # More nodes than the next rung's levels hold within the bounds: deeper, then wider.
    assert for_experts(TreeConfig(topk=4, steps=4, shape="auto"), 15) == TreeShape(3, 4, 15)


def test_a_fixed_shape_is_the_user_s() -> None:
    config = TreeConfig(topk=8, steps=6)
    for nodes in range(1, 64):
        assert for_experts(config, nodes) == dynamic(config, nodes) == whole(config, nodes)


def test_what_is_tried_first() -> None:
    config = TreeConfig(topk=4, steps=7, shape="auto")
    narrow = auto_schedule(config, 15, 256, NARROW)
    assert narrow[:3] == [(1, 3, 15), (4, 4, 14), (5, 8, 7)]
    assert narrow[-1] == (128, 256, 0)
    assert [nodes for *_, nodes in narrow] == [15, 14, 7, 6, 5, 3, 2, 1, 0]
    assert auto_schedule(config, 15, 256) == auto_schedule(config, 15, 256, DENSE) != narrow
    # More nodes than a tree may have are refused later, with a sentence.
    assert auto_schedule(config, 100, 256, NARROW)[0][2] == 100


@pytest.mark.parametrize(
    "answer",
    [TreeShape(8, 6, 30), TreeShape(8, 6, 32), TreeShape(0, 6, 31), TreeShape(8, 0, 31), 31],
)
def test_a_policy_that_answers_otherwise_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    monkeypatch.setattr(scheduling, "batches_by_nodes", lambda *_, **__: {31: [1], 0: [2]})
    engine: Any = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=31))
    config = TreeConfig(policy="wide")
    assert scheduling.plan_shapes(whole, config, engine) == {TreeShape(8, 6, 31): [1]}
    said = re.escape(f"graft.tree.policy 'wide' returned {answer!r} for 31 nodes")
    with pytest.raises(HookError, match=said):
        scheduling.plan_shapes(lambda *_: answer, config, engine)
