"""The pure functions that choose the replays of a batch, and the buckets."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.graph_runners.vision.bucket_plan import bucket_sizes, plan_buckets
from vllm_graft.graph_runners.vision.captures import capture_buckets
from vllm_graft.graph_runners.vision.graphs.vision_metrics import VitStats
from vllm_graft.graph_runners.vision.replay_plan import MAX_GROUP, choose, groups
from vllm_graft.graph_runners.vision.towers.tower import Item

TOWER: Any = SimpleNamespace(unit=4)
A, B = Item("a", 100), Item("b", 300)
items_lists = st.lists(st.sampled_from([A, B, Item("c", 64), Item("d", 1000)]), max_size=40)


@given(items_lists, st.integers(64, 4096))
def test_groups_hold_every_item_once(items: list[Item], max_rows: int) -> None:
    found = groups(items, max_rows)
    assert sorted(index for step in found for index in step.indices) == list(range(len(items)))
    for step in found:
        size = len(step.indices)
        assert size & (size - 1) == 0
        assert size <= MAX_GROUP
        layouts = {items[index].layout for index in step.indices}
        assert step.key == (layouts.pop(), size)
        assert not layouts
        assert step.rows == sum(items[index].rows for index in step.indices)
        assert size == 1 or step.rows <= max_rows


def test_twenty_images_are_two_graphs() -> None:
    assert [len(step.indices) for step in groups([A] * 20, 4096)] == [16, 4]
    assert [len(step.indices) for step in groups([A] * 20, 850)] == [8, 8, 4]


def test_hits_alone_are_replayed_exactly() -> None:
    items = [A, B, A]
    exact = groups(items, 4096)
    assert choose(items, exact, {("a", 2), ("b", 1)}, [512, 1024], 64) == exact
    # The cold rest goes to the smallest bucket.
    steps = choose(items, exact, {("a", 2)}, [256, 320, 2048], 64) or ()
    assert [(step.indices, getattr(step, "bucket", None)) for step in steps] == [
        ((1,), 320),
        ((0, 2), None),
    ]


def test_one_bucket_beats_many_small_graphs() -> None:
    items = [Item(layout, 40) for layout in range(12)]
    exact = groups(items, 4096)
    steps = choose(items, exact, {step.key for step in exact}, [512], 64) or ()
    assert [getattr(step, "bucket", None) for step in steps] == [512]


def test_nothing_fits() -> None:
    items = [A] * 3
    exact = groups(items, 4096)
    assert choose(items, exact, set(), [256], 64) is None  # The items have 300 rows.
    assert choose(items, exact, set(), [512], 2) is None  # There are three items.
    assert choose(items, exact, set(), [], 64) is None
    assert choose(items, exact, set(), [512], 3) is not None


@given(st.integers(4, 512), st.integers(4, 20000), st.sampled_from([1, 4, 64]))
def test_bucket_sizes_are_dense(smallest: int, largest: int, unit: int) -> None:
    sizes = bucket_sizes(smallest, largest, unit)
    assert sizes == sorted(set(sizes))
    assert all(size % unit == 0 and size <= largest for size in sizes)
    if largest >= unit:
        assert sizes[-1] == largest // unit * unit
    for small, large in itertools.pairwise(sizes):
        assert large <= 1.25 * small + 2 * unit


def test_default_buckets_pad_little() -> None:
    options: Any = SimpleNamespace(buckets=None, max_patches=None)
    unmeasured = plan_buckets(TOWER, options, [], measured=False)
    assert (unmeasured[0], unmeasured[-1]) == (128, 4096)
    assert len(unmeasured) <= 40
    assert all(large - small <= 192 for small, large in itertools.pairwise(unmeasured))
    assert all(large <= 1.5 * small for small, large in itertools.pairwise(unmeasured))
    sizes = plan_buckets(TOWER, options, [])
    assert sizes[: len(unmeasured)] == unmeasured
    assert sizes[len(unmeasured) :] == list(range(4096 + 256, 8193, 256))
    options.max_patches = 65536
    assert len(plan_buckets(TOWER, options, [])) <= 50


class Recorded:
    """A store in which buckets fit up to `fits` rows, and pay up to `pays` rows."""

    def __init__(self, fits: int, pays: int) -> None:
        self.stats, self.buckets = VitStats(), {}
        self.most_fitting, self.most_paying = fits, pays
        self.captured: list[tuple[int, bool]] = []
        self.restarts = 0

    def fits(self, rows: int) -> bool:
        return rows <= self.most_fitting

    def capture_bucket(self, rows: int, segments: int, gain: bool) -> str | None:
        self.captured.append((rows, gain))
        if gain and rows > self.most_paying:
            return "no_gain"
        self.buckets[rows] = self
        return None

    def restart(self) -> None:
        self.buckets.clear()
        self.restarts += 1


@pytest.mark.parametrize(
    ("fits", "pays", "tried", "kept"),
    [
        (9999, 9999, [8192], 8192),
        (6500, 5000, [6400, 5376, 4864, 5120, 4864], 4864),
        (6500, 4300, [6400, 5376, 4864, 4608, 4352, 4096], 4096),
        (6500, 4000, [6400, 5376, 4864, 4608, 4352, 4096, 3968], 3968),
        (3000, 9999, [2944], 2944),
        (9999, 0, None, 0),
    ],
)
def test_the_largest_bucket_that_fits_and_pays(
    fits: int, pays: int, tried: list[int] | None, kept: int
) -> None:
    options: Any = SimpleNamespace(buckets=None, max_patches=None)
    planned = plan_buckets(TOWER, options, [])
    store: Any = Recorded(fits, pays)
    found = capture_buckets(store, planned, 0, True, bool)
    assert found == [rows for rows in planned if rows <= kept]
    measured = [rows for rows, gain in store.captured if gain]
    if tried is not None:
        assert measured == tried
    # A bucket that was captured only to be measured is given back before the next attempt.
    assert store.restarts == len(measured) - bool(kept)
    assert store.stats.dropped["no_gain"] == sum(rows > pays for rows in measured)
