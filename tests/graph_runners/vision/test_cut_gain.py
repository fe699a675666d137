"""Batches larger than any graph: how they are cut, and when that pays."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.vision import towers
from vllm_graft.graph_runners.vision import replay_plan as plan
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner
from vllm_graft.graph_runners.vision.towers.tower import Item

SMALL = {"max_patches": 256, "buckets": [64, 128, 256], "capture_share": 1}
A, B, C = Item("a", 100), Item("b", 300), Item("c", 64)


@given(
    st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=40),
    st.integers(300, 2000),
    st.integers(1, 40),
)
def test_groups_hold_every_item_once_within_their_bounds(
    items: list[Item], max_rows: int, max_items: int
) -> None:
    found = plan.even_groups(items, range(len(items)), max_rows, max_items)
    assert found is not None
    assert sorted(index for group in found for index in group) == list(range(len(items)))
    rows = [sum(items[index].rows for index in group) for group in found]
    assert all(len(group) <= max_items for group in found)
    assert max(rows) <= max_rows
    # There are at most twice as many groups as a perfect packing needs, plus one.
    least = max(-(-sum(rows) // max_rows), -(-len(items) // max_items))
    assert least <= len(found) <= max(2 * least, least + 1)
    if max_items >= len(items):
        assert max(rows) - min(rows) <= 300  # Dealing leaves a difference of one item at most.


def test_groups_of_one_layout_lie_side_by_side() -> None:
    found = plan.even_groups([A] * 20, range(20), 1050, 64)
    assert found == [tuple(range(10)), tuple(range(10, 20))]
    assert plan.even_groups([A, B], range(2), 299, 64) is None
    assert plan.even_groups([], [], 299, 64) is None


def sizes(replays: Iterable[Any]) -> list[tuple[int, int | None]]:
    """Items of each replay, and its bucket."""
    return [(len(each.indices), getattr(each, "bucket", None)) for each in replays]


def test_what_no_bucket_holds_is_cut_only_if_it_may_be() -> None:
    items = [A] * 20
    exact = plan.groups(items, 1050)
    assert plan.choose(items, exact, set(), [512, 1050], 64) is None
    steps = plan.choose(items, exact, set(), [512, 1050], 64, cut=True) or ()
    assert sizes(steps) == [(10, 1050)] * 2
    hits = plan.choose(items, exact, {("a", 8)}, [512, 1050], 64, cut=True) or ()
    assert sizes(hits) == [(4, 512), *[(8, None)] * 2]


def slow(runner: Any, monkeypatch: Any, graphs: float) -> None:
    """Pretend that eager passes take one second, and replays `graphs` seconds."""
    replays: list[Any] = []
    honest = runner.store.replay

    def timed(region: Callable[[], Any]) -> tuple[Any, float]:
        replays.clear()
        return region(), graphs if replays else 1.0

    monkeypatch.setattr(runner.store, "replay", lambda *a: replays.append(a) or honest(*a))
    monkeypatch.setattr(runner.store.backend, "timed", timed)


def grids(seed: int = 0) -> list[towers.Grid]:
    side = 8 + 2 * (seed % 3)
    return [(1, side, side), (1, 4, 8), (1, 8, 8), (1, side, 8), (1, 8, 8)]


@pytest.fixture
def runner(model: Any) -> Iterator[ViTCudaGraphRunner]:
    made = towers.make_runner(model, SMALL)
    yield made
    made.clear()


def test_a_cut_batch_is_the_models_own_answer(kind: str, runner: Any, monkeypatch: Any) -> None:
    slow(runner, monkeypatch, 0.5)
    served = 0
    for seed in range(18):
        inputs = towers.batch(kind, grids(seed), seed=seed)
        found = runner.execute(inputs)
        served += found is not None
        assert found is None or towers.agree(found, towers.eager(runner.model, inputs))
    report = runner.report()
    # The first batch of a size class goes to the engine, the second is measured, the rest is cut.
    assert report["cuts"] == 18 - 2 * len(runner.cuts.pays)
    assert served == 18 - report["declines"]["too_large"]
    assert set(runner.cuts.pays.values()) == {True}
    assert report["failures"] == []


def test_exact_graphs_of_a_cut_batch_are_bitwise_the_groups(kind: str, runner: Any) -> None:
    inputs = towers.batch(kind, [(1, 8, 8)] * 7, seed=3)
    found = towers.prewarm(runner, inputs)
    assert set(found.values()) == {"captured", "cut"}
    answer = runner.execute(inputs)
    assert answer is not None
    items = runner.tower.items(inputs)
    for step in plan.groups(items, runner.max_rows):
        with torch.inference_mode():
            expected = runner.tower.eager(inputs, step.indices)
        assert towers.agree([answer[index] for index in step.indices], expected, exact=True)
    assert runner.stats.replays == {"exact": 3}
    assert runner.stats.items == {"exact": 7}


@pytest.mark.parametrize("graphs", [0.98, 2.0])
def test_what_is_not_faster_is_not_cut(
    kind: str, runner: Any, monkeypatch: Any, graphs: float
) -> None:
    slow(runner, monkeypatch, graphs)
    inputs = towers.batch(kind, grids())
    answers = [runner.execute(inputs) for _ in range(5)]
    # The second batch is measured, and the measured eager pass is its answer.
    assert [found is None for found in answers] == [True, False, True, True, True]
    assert runner.stats.declines == {"too_large": 4}
    assert runner.stats.items == {"eager": 25}
    assert (list(runner.cuts.pays.values()), runner.stats.cuts) == ([False], 0)


def test_a_cut_batch_that_differs_is_not_cut_again(
    kind: str, runner: Any, monkeypatch: Any
) -> None:
    honest = runner.store.run
    wrong = lambda *args: [2 * part for part in honest(*args) or ()]  # noqa: E731
    monkeypatch.setattr(runner.store, "run", wrong)
    inputs = towers.batch(kind, grids())
    assert runner.execute(inputs) is None
    assert towers.right(runner, inputs, exact=True)
    assert runner.execute(inputs) is None
    assert "5 items that was cut: item 0 has a relative error" in runner.report()["failures"][0]


def test_ranks_that_have_to_agree_never_cut(kind: str, runner: Any) -> None:
    runner.store.rules.timing = False
    inputs = towers.batch(kind, grids())
    assert [runner.execute(inputs) for _ in range(4)] == [None] * 4
    assert towers.prewarm(runner, inputs) == {("too_large", 0): "too_large"}
    assert runner.cuts.pays == {}


def test_one_large_image_is_left_to_the_engine(kind: str, runner: Any) -> None:
    for shapes in ([(1, 16, 32)], [(1, 16, 32), (1, 4, 4)]):
        inputs = towers.batch(kind, shapes)
        assert [runner.execute(inputs) for _ in range(3)] == [None] * 3
    assert runner.stats.declines == {"too_large": 6}
