"""When a head counts as worse than the one before."""

import random

import pytest

from vllm_graft.learn.yields import PARTS, Window, Yields, is_worse

SIZE = 1000


def yields(trees: int, mean: float, nodes: int = 7) -> Yields:
    made = Yields()
    made.add(nodes, trees, round(trees * mean))
    return made


@pytest.mark.parametrize(
    ("trees", "mean", "verdict"),
    [
        (SIZE // PARTS - 1, 1.0, None),
        (SIZE // PARTS, 1.0, True),
        (SIZE // PARTS, 1.85, None),
        (SIZE // PARTS, 3.0, None),
        (SIZE // 2, 1.9, True),
        (SIZE // 2, 1.95, None),
        (SIZE, 1.93, True),
        (SIZE, 1.95, False),
        (SIZE, 3.0, False),
    ],
)
def test_few_trees_say_it_of_much_less_only(trees: int, mean: float, verdict: bool | None) -> None:
    assert is_worse(yields(trees, mean), yields(SIZE, 2.0), SIZE) is verdict


def test_smaller_trees_of_a_larger_batch_are_no_worse_head() -> None:
    before, after = yields(SIZE, 3.0, 31), yields(SIZE, 2.0, 7)
    before.add(7, SIZE, 2 * SIZE)
    assert after.mean < 0.9 * before.mean
    assert after.over(before) == 1.0
    # Negative control: with one size it would be.
    assert yields(SIZE, 2.0).over(yields(SIZE, 2.5)) == 0.8
    # A size that nobody has seen is compared with all.
    assert yields(SIZE, 2.5, 15).over(before) == 1.0
    assert Yields().over(before) == 1.0


def test_a_window_forgets_what_is_older() -> None:
    window = Window(SIZE)
    for mean in (1, 3):
        for _ in range(2 * SIZE):
            window.add(yields(1, mean))
    assert window.sum.mean == 3.0
    assert SIZE <= window.sum.trees <= SIZE + SIZE // PARTS


def test_the_same_head_stays_most_of_the_time() -> None:
    """Requests of texts of different kinds, each of 200 trees, as the default window has 250."""
    draw = random.Random(0)

    def served(factor: float) -> Yields:
        made = Yields()
        for _ in range(250):
            made.add(7, 200, round(200 * (1 + factor * draw.uniform(0.8, 2.4))))
        return made

    size = 50_000
    same = [is_worse(served(1.0), served(1.0), size) for _ in range(100)]
    worse = [is_worse(served(0.8), served(1.0), size) for _ in range(100)]
    assert sum(map(bool, same)) <= 15
    assert sum(map(bool, worse)) >= 95
