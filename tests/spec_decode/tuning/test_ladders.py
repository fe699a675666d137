"""The ladder of drafts with experts, and that of dense drafts, which it leaves alone."""

from __future__ import annotations

import pytest

from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.trees.shape import MAX_NODES, TreeShape
from vllm_graft.spec_decode.tuning.shapes import (
    DENSE,
    NARROW,
    Ladder,
    auto_schedule,
    dynamic,
    for_experts,
    whole,
)


def shapes(ladder: Ladder, config: TreeConfig, nodes: int) -> list[TreeShape]:
    return [shape for shape, _ in ladder.within(config, nodes)]


def rows(shape: TreeShape) -> int:
    """Return the rows of all passes of a tree."""
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
