from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.expert_shapes import BATCHES, COSTS, TEXTS, length, ratios
from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.tuning.ladders import DENSE, NARROW


def test_a_tree_yields_the_chances_of_its_best_paths() -> None:
    chances = TEXTS["usual"][:2]
    assert length("usual", TreeShape(1, 3, 3)) == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)
    # Two levels of two: all four paths of two tokens are scored, and the best nodes kept.
    paths = [chances[0], chances[1], *(a * b for a, b in itertools.product(chances, chances))]
    best = sorted(paths, reverse=True)[:5]
    assert length("usual", TreeShape(2, 2, 5)) == pytest.approx(1 + sum(best))
    assert length("usual", None) == 1


def test_rows_share_experts() -> None:
    costs = COSTS[0]
    assert costs.rows(1) == pytest.approx(1.1)
    assert costs.rows(2) < 2 * costs.rows(1)
    # Many rows ask for all of them.
    everything = costs.experts / costs.asked
    assert costs.rows(1000) == pytest.approx(everything + 100)


@pytest.mark.parametrize("batch", BATCHES)
def test_the_narrow_ladder_is_near_the_best(batch: int) -> None:
    narrow, dense = ratios(NARROW, batch), ratios(DENSE, batch)
    assert statistics.mean(narrow) > 0.99
    assert min(narrow) > 0.94
    assert statistics.mean(narrow) > statistics.mean(dense) + 0.02
