"""Graphs of vLLM's own model code give the eager pass's embeddings for random batches.

The fake back end runs the captured Python again on the captured tensors, so stale metadata, swapped
tensors, aliased outputs and wrong padding show. GRAFT_VIT_BATCHES sets the number of batches.
"""

import os
import random
from typing import Any

import pytest
import torch

from tests.support.vision import towers
from vllm_graft.graph_runners.vision import replay_plan as plan
from vllm_graft.graph_runners.vision.graphs.embedding_check import relative_error
from vllm_graft.graph_runners.vision.towers.grid_tower import GridTower

BATCHES = int(os.environ.get("GRAFT_VIT_BATCHES", "60"))
GRIDS = [(1, 8, 8), (1, 4, 16), (1, 16, 4), (1, 4, 12), (1, 6, 8), (1, 2, 2), (1, 10, 14)]
VIDEOS = [(2, 4, 8), (9, 4, 4), (3, 6, 6), (80, 2, 2), (200, 2, 2)]
OPTIONS = {"max_patches": 1024, "buckets": [64, 128, 256, 512, 1024], "capture_share": 1}


@pytest.fixture(scope="module")
def runner(model: Any) -> Any:
    return towers.make_runner(model, OPTIONS)


def random_batch(kind: str, seed: int) -> Any:
    chance = random.Random(seed)
    video = chance.random() < 0.3
    kinds, most = (VIDEOS, 2) if video else (GRIDS, 7)
    grids = [chance.choice(kinds) for _ in range(chance.randint(1, most))]
    return towers.batch(kind, grids, "video" if video else "image", seed)


def assert_bitwise(runner: Any, inputs: Any, found: Any) -> None:
    """Compare with eager passes over the same groups, as other numbers of rows may differ."""
    tower = runner.tower
    for step in plan.groups(tower.items(inputs), runner.startup.max_rows):
        with torch.inference_mode():
            expected = tower.eager(inputs, step.indices)
        assert towers.agree([found[index] for index in step.indices], expected, exact=True)


def test_random_batches(kind: str, model: Any, runner: Any) -> None:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for seed in range(BATCHES):
        inputs = random_batch(kind, seed)
        expected = towers.eager(model, inputs)
        before = runner.stats.items["bucket"]
        found = runner.execute(inputs)
        if found is None:
            continue
        assert towers.agree(found, expected), f"seed {seed}"
        if runner.stats.items["bucket"] == before:
            assert_bitwise(runner, inputs, found)
        held.append((found[0], expected[0].clone()))
    # Later replays have not written to these embeddings.
    assert all(relative_error(ours, theirs) < 1e-5 for ours, theirs in held)
    report = runner.report()
    assert report["failures"] == []
    assert set(report["declines"]) <= {"too_large", "segments"}
    assert report["items"]["exact"] > BATCHES // 2
    assert report["items"]["bucket"] > BATCHES // 20
    assert report["padded_rows"] >= report["rows"] > 0
    assert report["dropped"] == {}


def use_tower(runner: Any, faulty: type[GridTower]) -> None:
    tower = faulty(runner.model, runner.config, torch.device("cpu"), torch.float32)
    runner.tower = runner.store.tower = tower


class KeyedBySum(GridTower):
    """A faulty tower whose layouts are only numbers of patches."""

    def items(self, inputs: Any) -> Any:
        found = super().items(inputs)
        self.last = found
        return [type(item)(("sum", item.rows), item.rows) for item in found]

    def constants(self, items: Any) -> Any:
        return super().constants(self.last[: len(items)])


def test_a_key_of_the_sum_alone_is_caught(kind: str, model: Any) -> None:
    """Negative control: with such a key the embeddings are wrong."""
    runner = towers.make_runner(model, {**OPTIONS, "buckets": [], "min_hits": 1, "verify": False})
    use_tower(runner, KeyedBySum)
    first = towers.batch(kind, [(1, 8, 8)])
    assert towers.prewarm(runner, first)
    wrong = towers.batch(kind, [(1, 4, 16)], seed=1)
    found = runner.execute(wrong)
    assert runner.stats.items["exact"] == 1
    assert relative_error(found[0], towers.eager(model, wrong)[0]) > 1e-2


def test_verify_refuses_such_a_key(kind: str, model: Any) -> None:
    runner = towers.make_runner(model, {**OPTIONS, "buckets": []})

    class Square(GridTower):
        """A faulty tower that takes every image for one of 8 by 8 patches."""

        def constants(self, items: Any) -> Any:
            square = ("image", 1, 8, 8, items[0].layout[-1])
            return super().constants([type(item)(square, item.rows) for item in items])

    use_tower(runner, Square)
    inputs = towers.batch(kind, [(1, 4, 16)])
    expected = towers.eager(model, inputs)
    for _ in range(4):
        found = runner.execute(inputs)
        assert found is None or towers.agree(found, expected, exact=True)
    report = runner.report()
    assert report["dropped"] == {"mismatch": 1}
    assert report["graphs"]["exact"] == 0
    assert "relative error" in report["failures"][0]
    assert report["refused"] == 1


@pytest.mark.parametrize(
    ("grids", "modality", "items", "frames"),
    [
        ([(1, 8, 8)], "image", 8, 64),
        ([(1, 8, 8), (1, 4, 12), (1, 6, 8)], "image", 8, 64),
        ([(9, 4, 4)], "video", 4, 4),
        ([(5, 4, 4), (5, 4, 4)], "video", 4, 8),
        ([(80, 2, 2)], "video", 4, 16),
    ],
)
def test_what_stock_graphs_get_wrong(
    kind: str, model: Any, grids: Any, modality: str, items: int, frames: int
) -> None:
    """vLLM's options are honoured where its graphs fail: padded offsets, and too many frames."""
    runner = towers.make_runner(
        model,
        encoder_cudagraph_token_budgets=[32, 64, 128],
        encoder_cudagraph_max_vision_items_per_batch=items,
        encoder_cudagraph_max_frames_per_batch=frames,
    )
    assert sorted(runner.store.buckets) == [128, 256, 512]
    inputs = towers.batch(kind, grids, modality)
    if grids[0][0] == 80:
        assert runner.execute(inputs) is None
        assert runner.stats.declines == {"segments": 1}
        assert towers.prewarm(runner, inputs)
    assert towers.right(runner, inputs)
    assert runner.graph_hits == len(grids)
