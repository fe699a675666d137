from __future__ import annotations

import pytest

from vllm_graft.config import EagleConfig
from vllm_graft.spec_decode import candidates
from vllm_graft.spec_decode.policy import TreeShape, dynamic


@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 5), (3, 1), (4, 4), (8, 6)])
def test_the_candidates_are_those_that_are_scored(topk: int, steps: int) -> None:
    shape = TreeShape(topk, steps, 1)
    # A level of topk nodes; each of its topk best gets topk children in the next.
    count = len([None for _ in range(topk)] + [None] * sum(topk * topk for _ in range(1, steps)))
    assert shape.num_candidates == count
    assert candidates.num_candidates(topk, steps) == count
    assert EagleConfig(topk=topk, steps=steps).max_nodes == count


def test_dynamic_takes_the_configured_bounds() -> None:
    assert dynamic(EagleConfig(topk=5, steps=3), 17) == TreeShape(5, 3, 17)
