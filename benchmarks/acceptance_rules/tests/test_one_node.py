"""Chances of acceptance at one node, against known values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from benchmarks.acceptance_rules.one_node import Hits, hits

IDS = torch.tensor([0, 2, 3, 5])
TARGET = torch.tensor([0.3, 0.05, 0.1, 0.25, 0.1, 0.2])
DRAFT = torch.tensor([0.1, 0.5, 0.2, 0.2])
DRAWS = 20000


def found(target: Tensor, draft: Tensor, numbers: list[int]) -> Hits:
    torch.manual_seed(0)
    return hits(target, draft, IDS, numbers, DRAWS, 1.0)


def first_draws(draft: Tensor, number: int) -> dict[tuple[int, ...], float]:
    """The chance of each sequence of `number` draws without replacement."""
    chances = {}
    for draws in itertools.permutations(range(len(draft)), number):
        left, chance = 1.0, 1.0
        for place in draws:
            chance, left = chance * float(draft[place]) / left, left - float(draft[place])
        chances[draws] = chance
    return chances


def bound(number: int) -> float:
    """The least of the bounds of all sets of tokens, which is what the best rule accepts."""
    least = 1.0
    for size in range(1, len(TARGET) + 1):
        for tokens in itertools.combinations(range(len(TARGET)), size):
            places = {place for place, token in enumerate(IDS.tolist()) if token in tokens}
            met = sum(c for draws, c in first_draws(DRAFT, number).items() if places & set(draws))
            least = min(least, 1 - float(TARGET[list(tokens)].sum()) + met)
    return least


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_bound_is_that_of_all_sets_of_tokens(number: int) -> None:
    result = found(TARGET, DRAFT, [number])
    assert float(result.bound[0]) == pytest.approx(bound(number), abs=0.01)
    assert float(result.recursive[0]) <= bound(number) + 0.01
    assert float(result.coupled[0]) <= bound(number) + 0.01


def test_one_child_is_accepted_as_often_as_is_known() -> None:
    result = found(TARGET, DRAFT, [1])
    whole = torch.zeros(6).index_put((IDS,), DRAFT)
    shared = float(torch.minimum(TARGET, whole).sum())
    assert float(result.recursive[0]) == pytest.approx(shared, abs=0.01)
    # Of two races with the same clocks: 1 / sum over j of max(p_j / p_i, q_j / q_i), for each i.
    coupled = sum(
        1 / float(torch.maximum(TARGET / TARGET[i], whole / whole[i]).sum()) for i in IDS.tolist()
    )
    assert float(result.coupled[0]) == pytest.approx(coupled, abs=0.01)
    assert coupled < shared - 0.02
    assert float(result.likeliest[0]) == pytest.approx(0.1)


def test_a_perfect_draft_is_always_right() -> None:
    target = torch.zeros(6).index_put((IDS,), DRAFT)
    result = found(target, DRAFT, [1, 2])
    for values in (result.coupled, result.recursive, result.bound):
        assert values.tolist() == pytest.approx([1, 1], abs=0.01)
    assert result.likeliest.tolist() == pytest.approx([0.5, 0.7])


def test_sharpness_changes_the_draft() -> None:
    torch.manual_seed(0)
    result = hits(TARGET, DRAFT, IDS, [1], DRAWS, 0.0)
    whole = torch.zeros(6).index_put((IDS,), torch.full((4,), 0.25))
    shared = float(torch.minimum(TARGET, whole).sum())
    assert float(result.recursive[0]) == pytest.approx(shared, abs=0.01)
