"""Graphs share buffers, but what one graph leaves there never reaches another one's answer."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.vision import towers
from vllm_graft.graph_runners.vision.capture.admission import TimeShare
from vllm_graft.graph_runners.vision.graphs import graph_store
from vllm_graft.graph_runners.vision.graphs.graph import PaddedGraph
from vllm_graft.graph_runners.vision.graphs.padding_metadata import MetadataCache, aligned
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner

SMALL = {"max_patches": 256, "buckets": [64, 128, 192, 256], "capture_share": 1}
SHAPES: list[list[towers.Grid]] = [
    [(1, 8, 8)],
    [(1, 4, 6)],
    [(1, 8, 12), (1, 4, 4)],
    [(1, 14, 16)],
    [(1, 2, 10), (1, 6, 6), (1, 2, 2)],
    [(1, 10, 10), (1, 8, 8), (1, 8, 8)],
]


@pytest.fixture
def runner(model: Any) -> Iterator[ViTCudaGraphRunner]:
    made = towers.make_runner(model, {**SMALL, "min_hits": 4})
    yield made
    made.clear()


def poison(runner: Any) -> None:
    """Fill all shared buffers with NaN, or with integers that are no valid places."""
    for buffer in runner.store.arena._buffers.values():
        buffer.fill_(math.nan if buffer.is_floating_point() else 1 << 30)


def differing(runner: Any, kind: str, turns: int = 48) -> int:
    """The number of batches whose answers differ from the eager ones, with poisoned buffers."""
    wrong = 0
    for turn in range(turns):
        inputs = towers.batch(kind, SHAPES[turn % len(SHAPES)], seed=turn)
        with torch.inference_mode():
            poison(runner)
        found = runner.execute(inputs)
        assert found is not None, runner.report()
        wrong += not towers.agree(found, towers.eager(runner.model, inputs))
    return wrong


def test_nothing_shared_lives_from_replay_to_replay(kind: str, runner: Any) -> None:
    assert differing(runner, kind) == 0
    report = runner.report()
    assert report["failures"] == []
    assert min(report["items"]["exact"], report["items"]["bucket"]) > 20
    assert report["graphs"]["bucket"] == 4


@pytest.mark.parametrize("name", ["pixel_values", "cos", "cu_"])
def test_a_buffer_that_is_not_written_anew_shows(
    kind: str, runner: Any, monkeypatch: Any, name: str
) -> None:
    """Negative control: a load that skips one buffer."""
    honest = PaddedGraph.load

    def load(graph: PaddedGraph, constants: Any, used: int, pieces: Any) -> bool:
        kept = {key: value.clone() for key, value in graph.buffers.items() if name in key}
        done = honest(graph, constants, used, pieces)
        for key, value in kept.items():
            graph.buffers[key].copy_(value)
        assert kept
        return done

    monkeypatch.setattr(PaddedGraph, "load", load)
    assert differing(runner, kind, 6) >= 5


def test_an_answer_that_is_not_cloned_is_overwritten(
    kind: str, runner: Any, monkeypatch: Any
) -> None:
    """Negative control: replays of other graphs write to outputs in the pool."""
    monkeypatch.setattr(graph_store, "_clones", lambda parts: parts)
    first = towers.batch(kind, SHAPES[0])
    kept = runner.execute(first) or []
    assert towers.agree(kept, towers.eager(runner.model, first))
    runner.execute(towers.batch(kind, SHAPES[3]))
    assert kept[0].isnan().all()


@pytest.mark.parametrize("own_segment", [True, False])
def test_padding_is_seen_by_nobody(
    kind: str, runner: Any, monkeypatch: Any, own_segment: bool
) -> None:
    """Rows of padding are NaN; it shows only if they share a segment with an item."""
    honest = PaddedGraph.load

    def load(graph: PaddedGraph, constants: Any, used: int, pieces: Any) -> bool:
        done = honest(graph, constants, used, pieces)
        graph.buffers["pixel_values"][used:] = math.nan
        if not own_segment:
            for name in graph._offsets:
                offsets = graph.buffers[name]
                offsets[offsets >= used] = graph.rows
        return done

    monkeypatch.setattr(PaddedGraph, "load", load)
    inputs = towers.batch(kind, [(1, 8, 10), (1, 6, 6)], seed=5)
    found = runner.execute(inputs)
    assert found is not None
    assert runner.stats.padded_rows > runner.stats.rows
    (first, second), expected = found, towers.eager(runner.model, inputs)
    assert torch.allclose(first, expected[0], atol=1e-5)
    assert torch.allclose(second, expected[1], atol=1e-5) is own_segment


def test_graphs_of_all_sizes_take_the_buffers_of_the_largest(kind: str, model: Any) -> None:
    alone = towers.make_runner(model, {**SMALL, "buckets": [256]})
    many = towers.make_runner(model, SMALL)
    assert len(many.store.buckets) == 4
    assert many.store.arena.sizes == alone.store.arena.sizes
    # A graph's own buffers are only the offsets of segments.
    assert all(max(graph.own) < 4096 for graph in many.store.buckets.values())
    assert many.report()["bytes_of"]["static"] == sum(many.store.arena.sizes) + sum(
        sum(graph.own) for graph in many.store.buckets.values()
    )
    # All outputs share one place in the pool.
    inputs = many.tower.sample(256)
    assert inputs is not None
    with torch.inference_mode():
        items = many.tower.items(inputs)
        read = {**many.tower.constants(items), **many.tower.data(inputs, range(len(items)))}
    assert {name for name, *_ in many.store.arena._buffers} <= set(read)
    assert many.report()["bytes_of"]["pool"] == alone.report()["bytes_of"]["pool"]


@pytest.mark.parametrize("room", [6, 1, 0])
def test_metadata_is_kept_on_the_host_while_it_fits(
    kind: str, runner: Any, room: int, monkeypatch: Any
) -> None:
    """Metadata are kept within room for six layouts, for the largest alone, or for none."""
    runner.router.rate = TimeShare(0)  # Only padded graphs serve.
    with torch.inference_mode():
        items = [runner.tower.items(towers.batch(kind, grids)) for grids in SHAPES]
        kept = [runner.store.buckets[256].metadata(each) or {} for each in items]
    most = max(sum(aligned(value.nbytes) for value in each.values()) for each in kept)
    if not room:
        refuse = lambda _: (_ for _ in ()).throw(RuntimeError("cannot pin"))  # noqa: E731
        monkeypatch.setattr(runner.store.backend, "host_block", refuse)
    before = runner.report()["bytes_of"]
    runner.store.metadata = MetadataCache(runner.store.backend, max(1, room) * most)
    runner.store.metadata.open()
    assert differing(runner, kind, 36) == 0
    found = runner.report()["metadata"]
    assert found["hits"] + found["misses"] == 36
    assert found["host_bytes"] <= found["host_limit"] == room * most
    expected = {6: range(30, 31), 1: range(1, 30), 0: range(1)}[room]
    assert found["hits"] in expected
    assert runner.report()["bytes_of"] == before  # Metadata take no device memory.
    runner.clear()
    assert runner.report()["metadata"]["host_bytes"] == 0


def test_what_is_kept_is_not_written_to(kind: str, runner: Any) -> None:
    """Negative control: if somebody writes to the block of metadata, answers are wrong."""
    runner.router.rate = TimeShare(0)
    inputs = towers.batch(kind, SHAPES[4], seed=1)
    assert runner.execute(inputs) is not None
    assert runner.store.metadata._block is not None
    with torch.inference_mode():
        runner.store.metadata._block.fill_(0x7F)
    found = runner.execute(inputs)
    expected = towers.eager(runner.model, inputs)
    assert runner.report()["metadata"]["hits"] == 1
    assert found is None or not torch.allclose(found[0], expected[0], atol=1e-5)
