"""The order of copies, on streams that run their work late."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.host_cache.simulated_copies import LAYERS, Rig, bytes_at, run_copy
from tests.support.host_cache.third_stores import raising
from tests.support.simulated_streams import simulated
from vllm_graft.hicache.copies import streams as stream_engine
from vllm_graft.hicache.copies.packed_pages import unfit
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer

HOST_DTYPES = [torch.float32, torch.float8_e4m3fn]


@pytest.fixture(params=HOST_DTYPES, ids=["plain", "fp8"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Make a rig; all values of these tests are exact in e4m3."""
    with simulated():
        yield Rig(True, request.param)


def test_store_is_late_and_finishes(rig: Rig) -> None:
    rig.write(3, 7.0)
    rig.engine.store(rig.operation(Direction.STORE, 3, 1))
    assert rig.engine.finished() == []
    assert not rig.slot(1).any()
    rig.engine.drain()
    (result,) = rig.engine.finished()
    assert not result.failed
    assert result.num_bytes == rig.slot_bytes
    assert (rig.slot(1) == 7.0).all()


def test_steps_are_timed_when_the_device_has_done_them(rig: Rig) -> None:
    compute = torch.cuda.Stream()
    with torch.cuda.stream(compute):
        rig.engine.begin_step(3)
        rig.write(3, 7.0)
        rig.engine.end_step()
        rig.engine.begin_step()
        rig.engine.end_step()
    assert rig.engine.step_seconds() == {}
    compute.synchronize()
    assert list(rig.engine.step_seconds()) == [3]
    assert rig.engine.step_seconds() == {}


@pytest.mark.parametrize(("fenced", "kept"), [(5, 7.0), (4, -1.0)])
def test_a_fence_keeps_a_block_until_its_store_has_read_it(
    rig: Rig, fenced: int, kept: float
) -> None:
    rig.write(3, 7.0)
    rig.engine.store(rig.operation(Direction.STORE, 3, 1, job=5))
    rig.engine.begin_step()
    rig.engine.fence([fenced])
    rig.write(3, -1.0)
    rig.engine.drain()
    assert (rig.slot(1) == kept).all()


def test_layers_are_there_once_they_are_waited_for(rig: Rig) -> None:
    rig.fill(2, 9.0)
    rig.engine.begin_step()
    rig.engine.load_layers(rig.operation(Direction.LOAD, 6, 2), first=())
    names = list(rig.caches)
    assert not rig.caches[names[0]][6].any()
    rig.engine.wait_layer(names[0])
    assert (rig.caches[names[0]][6] == 9.0).all()
    assert not rig.caches[names[1]][6].any(), "the next layer is still on its way"
    assert rig.engine.wait_all_layers() == LAYERS - 1
    assert all((cache[6] == 9.0).all() for cache in rig.caches.values())
    assert rig.engine.wait_all_layers() == 0


@pytest.mark.parametrize("count", [1, 2, 3, 5, 32, 80])
def test_batches_of_layers_are_small_at_both_ends(count: int) -> None:
    batches = stream_engine.layer_batches(count)
    assert [place for batch in batches for place in batch] == list(range(count))
    sizes = [len(batch) for batch in batches]
    assert sizes[0] == sizes[-1] == 1
    assert max(sizes) <= stream_engine.LAYERS_AT_ONCE
    if count == 32:
        assert sizes == [1, 1, 2, 4, 4, 4, 4, 4, 4, 2, 1, 1]


def test_a_batch_of_layers_is_one_copy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_engine, "layer_batches", lambda count: [range(1), range(1, count)])
    rig.fill(2, 9.0)
    rig.fill(3, 5.0)
    names, ranges = list(rig.caches), []

    stock = rig.engine._convert or run_copy

    def seen(*arguments: Any) -> Any:
        enqueue = stock(*arguments)

        def one(begin: int, end: int) -> None:
            ranges.append((begin, end))
            enqueue(begin, end)

        return one

    if rig.engine._convert is None:
        rig.engine._run_copy = seen
    else:
        rig.engine._convert = seen
    both = CacheOperation([0], Direction.LOAD, [PoolTransfer(0, [2, 3], [6, 1])])
    rig.engine.load_layers(both, first=())
    assert ranges == [(0, 2), (2, 6)]
    rig.engine.wait_layer(names[1])
    # These layers came together.
    for name in names[1:]:
        assert (rig.caches[name][6] == 9.0).all()
        assert (rig.caches[name][1] == 5.0).all()
    assert rig.engine.wait_all_layers() == 2
    rig.engine.drain()
    (result,) = rig.engine.finished()
    assert result.num_bytes == 2 * rig.slot_bytes


def test_a_whole_load_is_waited_for_in_one_copy(rig: Rig) -> None:
    """This is for FULL graphs, in which no layer can be waited for on its own."""
    rig.fill(2, 9.0)
    rig.engine.load_now(rig.operation(Direction.LOAD, 6, 2))
    assert all((cache[6] == 9.0).all() for cache in rig.caches.values())
    assert rig.engine.wait_all_layers() == 0


def test_layers_without_hooks_come_first(rig: Rig) -> None:
    rig.fill(2, 9.0)
    names = list(rig.caches)
    rig.engine.load_layers(rig.operation(Direction.LOAD, 6, 2), first={names[2]})
    rig.engine.wait_layer(names[2])
    assert (rig.caches[names[2]][6] == 9.0).all()
    assert not rig.caches[names[0]][6].any()


def test_two_requests_of_a_step_share_a_layers_wait(rig: Rig) -> None:
    rig.fill(0, 3.0)
    rig.fill(1, 4.0)
    rig.engine.load_layers(rig.operation(Direction.LOAD, 5, 0, job=0), first=())
    rig.engine.load_layers(rig.operation(Direction.LOAD, 6, 1, job=1), first=())
    first = next(iter(rig.caches))
    rig.engine.wait_layer(first)
    assert (rig.caches[first][5] == 3.0).all()
    assert (rig.caches[first][6] == 4.0).all()


def test_async_load_starts_behind_the_work_of_earlier_steps(rig: Rig) -> None:
    compute = torch.cuda.Stream()
    rig.fill(2, 9.0)
    with torch.cuda.stream(compute):
        rig.write(6, 0.0)  # vLLM zeroes a block, then hands it to the load
        rig.engine.begin_step()
    rig.engine.load(rig.operation(Direction.LOAD, 6, 2))
    rig.engine.drain()
    compute.synchronize()
    assert all((cache[6] == 9.0).all() for cache in rig.caches.values())


def test_a_copy_that_raises_has_failed(rig: Rig) -> None:
    broken = raising(RuntimeError("no such device"))
    rig.engine._batch_copy = rig.engine._run_copy = broken
    rig.engine._convert = rig.engine._convert and broken
    rig.engine.load(rig.operation(Direction.LOAD, 6, 2))
    assert [result.failed for result in rig.engine.finished()] == [True]
    load = rig.operation(Direction.LOAD, 6, 2)
    rig.engine.load_layers(load, first=())
    assert rig.engine.take_incomplete() == [load]
    assert [result.failed for result in rig.engine.finished()] == [True]
    assert rig.engine.wait_all_layers() == 0, "nothing is waited for that nobody runs"


@pytest.mark.parametrize("marked", [[], [3], [0, 2, 5]])
def test_a_store_that_has_ended_tells_which_pages_do_not_fit(marked: list[int]) -> None:
    """Runs go layer by layer, two pages each; the last byte of a run is its mark."""

    def convert(runs: Any, direction: Direction) -> Any:
        def copy(begin: int, end: int) -> None:
            for run in range(begin, end):
                mark = torch.tensor([run in marked], dtype=torch.uint8)
                bytes_at(int(runs.host[run] + runs.sizes[run]) - 1, 1).copy_(mark)

        return copy

    with simulated():
        rig = Rig(True, torch.float8_e4m3fn)
        rig.engine._convert, rig.engine._unfit = convert, unfit
        for way in Direction:
            rig.engine.begin_step()
            work = rig.pages(way, [3, 4], [1, 5])
            (rig.engine.store if way is Direction.STORE else rig.engine.load)(work)
            assert rig.engine.finished() == []
            rig.engine.drain()
            (result,) = rig.engine.finished()
            assert not result.failed
            slots = sorted({(1, 5)[run % 2] for run in marked})
            assert result.unfit == (slots if way is Direction.STORE else [])


@pytest.mark.parametrize("host_dtype", HOST_DTYPES)
@pytest.mark.parametrize("streams", [True, False])
def test_a_load_within_a_step_is_tried_twice(streams: bool, host_dtype: torch.dtype) -> None:
    """The second layer's copy fails, but the computation that follows reads all layers right."""
    with simulated():
        rig = Rig(streams, host_dtype)
        rig.fill(2, 9.0)
        calls = 0

        def breaking(stock: Any, at: int) -> Any:
            def broken(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    raise OSError("injected")
                return stock(*arguments)

            return broken

        if streams and rig.engine._convert is not None:
            convert = rig.engine._convert
            rig.engine._convert = lambda *runs: breaking(convert(*runs), 2)
        elif streams:
            rig.engine._run_copy = lambda runs: breaking(run_copy(runs), 2)
        else:
            rig.engine._copies = breaking(rig.engine._copies, 1)
        rig.engine.load_layers(rig.operation(Direction.LOAD, 6, 2), first=())
        assert rig.engine.wait_all_layers() == 0
        assert rig.engine.take_incomplete() == []
        assert rig.engine.second_tries == 1
        seen = [cache[6].clone() for cache in rig.caches.values()]
        rig.engine.drain()
        assert all((cache == 9.0).all() for cache in seen)
        assert [result.failed for result in rig.engine.finished()] == [False]


@pytest.mark.parametrize("host_dtype", HOST_DTYPES)
def test_memory_engine_copies_at_once(host_dtype: torch.dtype) -> None:
    rig = Rig(False, host_dtype)
    rig.write(3, 7.0)
    rig.engine.store(rig.operation(Direction.STORE, 3, 1))
    assert (rig.slot(1) == 7.0).all()
    rig.engine.load_layers(rig.operation(Direction.LOAD, 6, 1), first=())
    assert all((cache[6] == 7.0).all() for cache in rig.caches.values())
    assert len(rig.engine.finished()) == 2


def test_async_load_waits_for_the_store_that_still_reads_its_block(rig: Rig) -> None:
    """A freed block goes to a request that loads, while its last owner's store is queued."""
    compute = torch.cuda.Stream()
    rig.write(3, 7.0)
    rig.fill(2, 9.0)
    rig.engine.store(rig.operation(Direction.STORE, 3, 1, job=5))
    with torch.cuda.stream(compute):
        rig.engine.begin_step()
        rig.engine.fence([5])
    rig.engine.load(rig.operation(Direction.LOAD, 3, 2, job=6))
    rig.engine.drain()
    assert (rig.slot(1) == 7.0).all(), "the store read what the load wrote"
    assert all((cache[3] == 9.0).all() for cache in rig.caches.values())
