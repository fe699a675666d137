"""2D copies on streams that run late, by a stand-in for libcuda that moves bytes."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.host_cache.pretended_cuda import PretendedCuda
from tests.support.host_cache.simulated_copies import LAYERS, ROW, Rig, run_copy
from tests.support.host_cache.submitted_loads import LOAD_WAYS, submit_load
from tests.support.simulated_streams import simulated
from vllm_graft.base.log import logger
from vllm_graft.hicache.copies import cuda_driver, page_kernel, strided
from vllm_graft.hicache.copies import streams as streams_module
from vllm_graft.hicache.copies.cuda_driver import (
    DESCRIPTOR,
    CudaDriver,
    CudaDriverError,
    descriptors,
)
from vllm_graft.hicache.copies.row_copies import BUFFERS, StagingRing
from vllm_graft.hicache.copies.strided import StridedCopies
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.cache_stats import COUNTERS
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata, HiCacheReport, Transferred
from vllm_graft.hicache.pages import pool_shape
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.layout import group_layers
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape
from vllm_graft.hicache.rank.worker import HiCacheWorker

Pairs = dict[int, int]
"""Slots by block."""

ROWS: Pairs = {4: 1, 5: 2, 6: 3, 7: 4, 12: 7}
"""Four rows, and a single block."""

DOWN: Pairs = {12 - slot: slot for slot in range(8)}
MIXED: Pairs = {1: 0, 2: 1, 3: 2, 12: 3, 9: 4, 14: 5, 6: 7}
"""Three rows are copied straight, three through buffers, and there is a single block."""

CHUNK_ROWS = 2


class _Rows(Rig):
    """A rig whose slots have their number plus one as values, once they are filled."""

    def __init__(self, host_dtype: torch.dtype = torch.float32, chunk_rows: int = 0) -> None:
        self.cuda = PretendedCuda()
        super().__init__(True, host_dtype, CudaDriver(self.cuda, 0), chunk_rows)

    def fill_all(self) -> None:
        for slot in range(len(self.host)):
            self.fill(slot, slot + 1.0)

    @property
    def ring(self) -> StagingRing:
        return self.engine._rows.ring

    def copy_of(self, way: Direction, pairs: Pairs, job: int = 0) -> Any:
        return self.pages(way, list(pairs), list(pairs.values()), job)

    def load_of(self, pairs: Pairs, job: int = 0) -> Any:
        return self.copy_of(Direction.LOAD, pairs, job)

    def arrived(self, name: str, pairs: Pairs) -> list[bool]:
        cache = self.caches[name]
        return [bool((cache[block] == slot + 1.0).all()) for block, slot in pairs.items()]

    def all_arrived(self, pairs: Pairs) -> bool:
        others = [block for block in range(16) if block not in pairs]
        untouched = not any(cache[others].any() for cache in self.caches.values())
        return untouched and all(all(self.arrived(name, pairs)) for name in self.caches)

    def submit(self, way: str, pairs: Pairs) -> None:
        self.engine.begin_step()
        submit_load(self.engine, way, self.load_of(pairs))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker choose its engine as on a GPU."""
    monkeypatch.setattr(page_kernel, "warm_up", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let streams run late, and three rows be a 2D copy."""
    monkeypatch.setattr(strided, "LEAST_BYTES", 3 * ROW)
    with simulated():
        yield


@pytest.fixture
def rows(streams: None) -> _Rows:
    return _Rows()


@pytest.fixture
def rig(streams: None) -> _Rows:
    made = _Rows(chunk_rows=CHUNK_ROWS)
    made.fill_all()
    return made


def test_stores_and_loads_bring_the_bytes(rows: _Rows) -> None:
    for block, slot in ROWS.items():
        rows.write(block, slot + 1.0)
    rows.engine.store(rows.copy_of(Direction.STORE, ROWS, job=5))
    assert not rows.host.any(), "the store runs late"
    rows.engine.begin_step()
    rows.engine.fence([5])
    for block in ROWS:
        rows.write(block, -1.0)
    assert all((rows.slot(slot) == slot + 1.0).all() for slot in ROWS.values())
    assert not rows.slot(0).any()
    assert not rows.slot(5).any()
    rows.engine.begin_step()
    rows.engine.load(rows.load_of(ROWS))
    rows.engine.drain()
    torch.cuda.current_stream().synchronize()
    assert rows.all_arrived(ROWS)
    assert rows.cuda.copied == [(Direction.STORE, 4)] * LAYERS + [(Direction.LOAD, 4)] * LAYERS
    for result in rows.engine.finished():
        assert not result.failed
        assert result.num_bytes == 5 * rows.slot_bytes
        assert result.strided_bytes == 4 * rows.slot_bytes


@pytest.mark.parametrize("way", [*LOAD_WAYS, "store"])
def test_a_copy_that_the_driver_refuses(rows: _Rows, way: str) -> None:
    """The operation fails, or is done again in its step; the next ones go by other ways."""
    rows.fill_all()
    rows.cuda.fails_at = 2
    direction = Direction.STORE if way == "store" else Direction.LOAD
    operation = rows.copy_of(direction, ROWS)
    assert rows.engine.strided
    if way == "store":
        rows.engine.store(operation)
    else:
        submit_load(rows.engine, way, operation)
    assert not rows.engine.strided
    if way in ("async", "store"):
        assert [result.failed for result in rows.engine.finished()] == [True]
        assert rows.engine.second_tries == 0
        rows.fill_all()
        rows.engine.load_now(rows.load_of(ROWS))
    else:
        assert rows.engine.second_tries == 1
        assert rows.engine.wait_all_layers() == 0
    assert rows.all_arrived(ROWS)
    assert rows.engine.take_incomplete() == []
    rows.engine.drain()
    assert [(r.failed, r.strided_bytes) for r in rows.engine.finished()] == [(False, 0)]
    assert len(rows.cuda.copied) == 1


class _Memcpy2D(ctypes.Structure):
    """The struct for 2D copies that cuda.h declares."""

    _fields_ = [
        *((f"from_{n}", t) for n, t in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("from_type", ctypes.c_int),
        ("from_host", ctypes.c_void_p),
        ("from_device", ctypes.c_ulonglong),
        ("from_array", ctypes.c_void_p),
        ("from_pitch", ctypes.c_size_t),
        *((f"to_{n}", t) for n, t in (("x", ctypes.c_size_t), ("y", ctypes.c_size_t))),
        ("to_type", ctypes.c_int),
        ("to_host", ctypes.c_void_p),
        ("to_device", ctypes.c_ulonglong),
        ("to_array", ctypes.c_void_p),
        ("to_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


def test_descriptors_are_as_in_c() -> None:
    assert DESCRIPTOR.itemsize == ctypes.sizeof(_Memcpy2D)
    columns = (np.array([value, value + 100], np.int64) for value in (10, 20, 30, 40, 50, 60))
    copies = StridedCopies(*columns)
    for direction, host, device in (
        (Direction.LOAD, "from", "to"),
        (Direction.STORE, "to", "from"),
    ):
        table = descriptors(copies, direction)
        second = _Memcpy2D.from_buffer_copy(table[1].tobytes())
        found = {name: getattr(second, name) or 0 for name, _ in _Memcpy2D._fields_}
        expected = dict.fromkeys(found, 0) | {
            f"{host}_type": 1,
            f"{host}_host": 120,
            f"{host}_pitch": 140,
            f"{device}_type": 2,
            f"{device}_device": 110,
            f"{device}_pitch": 130,
            "width": 150,
            "height": 160,
        }
        assert found == expected


def test_errors_of_the_driver_have_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaDriverError, match=r"cuDeviceGet failed with 101 .CUDA_ERROR_INV"):
        CudaDriver(PretendedCuda(), 3)
    driver = CudaDriver(PretendedCuda(max_pitch=64), 0)
    assert driver.max_pitch == 64
    one = [np.array([value], np.int64) for value in (0, 0, 65, 65, 1, 2)]
    with pytest.raises(CudaDriverError, match=r"failed with 1 .CUDA_ERROR_INV"):
        driver.prepare(StridedCopies(*one), Direction.LOAD)(0, 1)
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-nobody-has.so.1")
    with pytest.raises(CudaDriverError, match=r"libcuda-that-nobody-has.so.1 cannot be used: .*"):
        CudaDriver.load(0)


@pytest.mark.usefixtures("no_gpu")
def test_without_libcuda_other_ways_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-nobody-has.so.1")
    worker = _worker()
    rows = _Rows()
    worker._engine = worker._stream_engine({}, rows.shard)
    assert worker.counters()["strided_copies"] is False
    assert "no 2D copies" in said[0]
    monkeypatch.setattr(CudaDriver, "load", lambda device: CudaDriver(rows.cuda, device))
    worker._engine = worker._stream_engine({}, rows.shard)
    assert worker.counters()["strided_copies"] is True


class _Runtime:
    def __init__(self) -> None:
        self.pinned: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


def test_no_slot_is_pinned_in_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = _Runtime()
    monkeypatch.setattr(pool_shape, "PIN_BYTES", 8 * PAGE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = HostPool(PoolShape(7, 3 * PAGE, 2))
    assert pool.shape.pinned_slots == 2
    pool.pin(1)
    start = pool.shard_address(1)
    assert [(at - start, size) for at, size in runtime.pinned] == [
        (0, 6 * PAGE),
        (6 * PAGE, 6 * PAGE),
        (12 * PAGE, 6 * PAGE),
        (18 * PAGE, 3 * PAGE),
    ]
    pool.close()


@pytest.mark.parametrize("way", LOAD_WAYS)
def test_loads_bring_the_bytes(rig: _Rows, way: str) -> None:
    rig.submit(way, MIXED)
    if way == "layers":
        assert rig.engine.wait_all_layers() == LAYERS
    if way == "async":
        assert not any(cache.any() for cache in rig.caches.values()), "the load runs late"
        rig.engine.drain()
    assert rig.all_arrived(MIXED)
    rig.engine.drain()
    (result,) = rig.engine.finished()
    assert not result.failed
    assert result.num_bytes == 7 * rig.slot_bytes
    assert result.strided_bytes == result.staged_bytes == 3 * rig.slot_bytes
    rows = [rows for _, rows in rig.cuda.copied]
    # Three rows go straight to their blocks, and two and one to buffers.
    assert sorted(rows) == sorted([3, 2, 1] * LAYERS)


@pytest.mark.parametrize("way", LOAD_WAYS)
def test_more_chunks_than_buffers(rig: _Rows, way: str) -> None:
    chunks = LAYERS * len(DOWN) // CHUNK_ROWS
    assert chunks > 2 * BUFFERS
    rig.submit(way, DOWN)
    # The copies' stream goes ahead as far as the waits allow.
    rig.engine._streams[Direction.LOAD].synchronize()
    assert rig.all_arrived(DOWN)
    rig.engine.drain()
    (result,) = rig.engine.finished()
    assert result.staged_bytes == result.num_bytes == 8 * rig.slot_bytes
    assert rig.cuda.copied == [(Direction.LOAD, CHUNK_ROWS)] * chunks


def test_slots_that_go_to_two_requests(rig: _Rows) -> None:
    """One of the requests is loaded through buffers."""
    both = [*DOWN.items(), *((block - 5, slot) for block, slot in DOWN.items() if block > 8)]
    blocks, slots = zip(*[pair for pair in both if pair[1] < 4])
    assert sorted(slots) == [0, 0, 1, 1, 2, 2, 3, 3]
    rig.engine.load_now(rig.pages(Direction.LOAD, list(blocks), list(slots)))
    assert rig.all_arrived(dict(zip(blocks, slots)))
    (result,) = rig.engine.finished()
    assert result.staged_bytes == 4 * rig.slot_bytes


@pytest.mark.parametrize(("chunk_rows", "pairs"), [(0, ROWS), (CHUNK_ROWS, MIXED)])
def test_layers_are_there_once_they_are_waited_for(chunk_rows: int, pairs: Pairs) -> None:
    rig = _Rows(chunk_rows=chunk_rows)
    rig.fill_all()
    names = list(rig.caches)
    rig.engine.begin_step()
    rig.engine.load_layers(rig.load_of(pairs), first={names[2]})
    for name in (names[2], names[0], names[1]):
        assert not any(rig.arrived(name, pairs))
        rig.engine.wait_layer(name)
        assert all(rig.arrived(name, pairs)), "straight, by way of a buffer, and for itself"
    assert rig.engine.wait_all_layers() == 0
    assert (rig.cuda.copied == [(Direction.LOAD, 4)] * LAYERS) is (pairs is ROWS)


def test_layers_that_are_copied_together_share_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "layer_batches", lambda count: [range(2), range(2, count)])
    rig = _Rows(chunk_rows=2 * CHUNK_ROWS)
    rig.fill_all()
    rig.engine.begin_step()
    rig.engine.load_layers(rig.load_of(DOWN), first=())
    rig.engine.wait_layer("layers.1.attn")
    assert [all(rig.arrived(name, DOWN)) for name in rig.caches] == [True, True, False]
    rig.engine.drain()
    assert rig.all_arrived(DOWN)
    # A chunk has room for three pages of a layer in any case.
    assert [rows for _, rows in rig.cuda.copied] == [2, 1, 2, 1, 2, 3, 3, 2]


def test_without_its_wait_a_buffer_is_overwritten(rig: _Rows) -> None:
    """Negative control of test_more_chunks_than_buffers."""
    ring = rig.ring
    stock = ring.through

    def careless(*arguments: Any) -> None:
        ring._emptied = [torch.cuda.Event() for _ in range(BUFFERS)]
        stock(*arguments)

    ring.through = careless  # type: ignore[method-assign]
    rig.submit("layers", DOWN)
    rig.engine._streams[Direction.LOAD].synchronize()
    assert not rig.all_arrived(DOWN)


def test_without_waiting_for_its_copy_a_buffer_is_emptied_too_soon(rig: _Rows) -> None:
    ring = rig.ring

    class _Nowhere(torch.cuda.Event):  # type: ignore[misc,valid-type]
        def record(self, stream: Any = None) -> None:
            pass

    ring._filled = [_Nowhere() for _ in range(BUFFERS)]
    rig.submit("async", DOWN)
    ring.synchronize()
    rig.engine.drain()
    assert not rig.all_arrived(DOWN)


@pytest.mark.parametrize(
    ("wrong", "missing"),
    [(lambda ring, copies: copies, {12, 9, 14}), (lambda ring, copies: ring.stream, {6})],
    ids=["the copies' stream", "the ring's alone"],
)
def test_a_layer_s_event_on_one_stream_alone_is_early(
    rig: _Rows, wrong: Callable[[Any, Any], Any], missing: set[int]
) -> None:
    """Negative control of test_layers_are_there_once_they_are_waited_for."""
    ring = rig.ring
    ring.behind = lambda copies: wrong(ring, copies)  # type: ignore[method-assign]
    rig.engine.begin_step()
    rig.engine.load_layers(rig.load_of(MIXED), first=())
    name = next(iter(rig.caches))
    rig.engine.wait_layer(name)
    there = dict(zip(MIXED, rig.arrived(name, MIXED)))
    assert {block for block, arrived in there.items() if not arrived} == missing


@pytest.mark.parametrize("joined", [True, False])
def test_an_operation_has_ended_when_its_kernels_have(rig: _Rows, joined: bool) -> None:
    """The join delays the report: without it vLLM would run the request too early."""
    if not joined:
        rig.ring.join = lambda copies: None  # type: ignore[method-assign]
    pairs = {block: slot for block, slot in DOWN.items() if slot < 4}
    rig.submit("async", pairs)
    assert rig.engine.finished() == []
    rig.engine._streams[Direction.LOAD].synchronize()
    assert [result.failed for result in rig.engine.finished()] == [False]
    assert rig.all_arrived(pairs) is joined


@pytest.mark.parametrize("joined", [True, False])
def test_a_later_load_of_the_same_blocks_is_the_last_to_write(rig: _Rows, joined: bool) -> None:
    """The first load goes through buffers, the second straight."""
    if not joined:
        rig.ring.join = lambda copies: None  # type: ignore[method-assign]
    rig.engine.begin_step()
    rig.engine.load(rig.load_of({10: 0, 9: 1, 8: 2}, job=1))
    rig.engine.load(rig.load_of({8: 5, 9: 6, 10: 7}, job=2))
    rig.engine.drain()
    assert rig.all_arrived({8: 5, 9: 6, 10: 7}) is joined
    assert [result.staged_bytes for result in rig.engine.finished()] == [3 * rig.slot_bytes, 0]


def test_two_loads_in_a_row_share_the_buffers(rig: _Rows) -> None:
    first = {13 - slot: slot for slot in range(5)}
    second = dict(zip((2, 5, 1, 4, 3), range(3, 8)))
    rig.engine.begin_step()
    rig.engine.load_layers(rig.load_of(first, job=1), first=())
    rig.engine.load(rig.load_of(second, job=2))
    rig.engine.drain()
    assert rig.all_arrived(first | second)
    assert rig.engine.wait_all_layers() == LAYERS
    for result in rig.engine.finished():
        assert result.staged_bytes == 5 * rig.slot_bytes


def test_drain_waits_for_the_kernels(rig: _Rows) -> None:
    """Drain also waits for the kernels of a step's load that nothing else has waited for."""
    rig.submit("layers", DOWN)
    rig.engine.drain()
    assert rig.ring.stream.query()
    assert rig.engine._streams[Direction.LOAD].query()
    assert rig.all_arrived(DOWN)


@pytest.mark.parametrize("fenced", [True, False])
def test_a_store_has_read_its_blocks_before_they_are_written(rig: _Rows, fenced: bool) -> None:
    pairs = {12: 0, 11: 1, 10: 2}
    for block in pairs:
        rig.write(block, 9.0)
    rig.engine.store(rig.pages(Direction.STORE, list(pairs), [5, 6, 7], job=5))
    rig.engine.begin_step()
    if fenced:
        # The fence is on another stream than the loads', like the compute stream.
        with torch.cuda.stream(torch.cuda.Stream()):
            rig.engine.fence([5])
    rig.engine.load(rig.load_of(pairs, job=6))
    rig.engine._streams[Direction.LOAD].synchronize()
    rig.engine.drain()
    assert rig.all_arrived(pairs)
    assert all(bool((rig.slot(slot) == 9.0).all()) for slot in (5, 6, 7)) is fenced


@pytest.mark.parametrize("way", LOAD_WAYS)
@pytest.mark.parametrize("broken", ["table", "launch", "copy"])
def test_what_cannot_be_staged_is_loaded_otherwise(rig: _Rows, way: str, broken: str) -> None:
    """The operation fails, or is done again in its step; the next ones go by other ways."""
    launches = 0

    def fails_second(runs: Any) -> Any:
        enqueue = run_copy(runs)

        def second(begin: int, end: int) -> None:
            nonlocal launches
            launches += 1
            if launches == 2:
                raise RuntimeError("no such kernel")
            enqueue(begin, end)

        return second

    def no_table(runs: Any) -> Any:
        raise torch.OutOfMemoryError("no memory for a table")

    if broken == "copy":
        rig.cuda.fails_at = 2
    else:
        rig.engine._rows._run_copy = no_table if broken == "table" else fails_second
    assert rig.engine.staged
    rig.submit(way, DOWN)
    assert rig.ring.stream.query(), "no kernel of a load that has failed is left"
    # If the table failed, no kernel was tried, so the next load may be staged again.
    assert rig.engine.staged is (broken == "table")
    assert rig.engine.strided is (broken != "copy")
    if way == "async":
        assert [result.failed for result in rig.engine.finished()] == [True]
        assert rig.engine.second_tries == 0
        for cache in rig.caches.values():
            cache.zero_()
        rig.engine._rows._run_copy = run_copy
        rig.engine.load_now(rig.load_of(DOWN))
    else:
        assert rig.engine.second_tries == 1
        assert rig.engine.wait_all_layers() == 0
    assert rig.all_arrived(DOWN)
    assert rig.engine.take_incomplete() == []
    rig.engine.drain()
    (result,) = rig.engine.finished()
    assert not result.failed
    again = way == "async" and broken == "table"
    assert result.staged_bytes == (8 * rig.slot_bytes if again else 0)


def test_stores_go_by_other_ways(rig: _Rows) -> None:
    for block, slot in DOWN.items():
        rig.write(block, -float(slot))
    rig.engine.store(rig.pages(Direction.STORE, list(DOWN), list(DOWN.values())))
    rig.engine.drain()
    assert all((rig.slot(slot) == -float(slot)).all() for slot in DOWN.values())
    assert rig.cuda.copied == []
    assert [result.staged_bytes for result in rig.engine.finished()] == [0]


@pytest.mark.parametrize(("chunk_rows", "pairs"), [(0, ROWS), (CHUNK_ROWS, DOWN)])
def test_what_the_host_keeps_as_fp8_has_its_own_way(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, pairs: Pairs
) -> None:
    monkeypatch.setattr(strided, "LEAST_BYTES", ROW)
    rig = _Rows(torch.float8_e4m3fn, chunk_rows)
    rig.fill_all()
    rig.engine.load_now(rig.load_of(pairs))
    assert rig.all_arrived(pairs)
    assert not rig.engine.staged
    assert not rig.engine.strided
    assert rig.cuda.copied == []


def test_buffers_that_no_row_fits_into_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Rig(True, strided=CudaDriver(PretendedCuda(), 0), staging_rows=1)
    assert stock.engine.staged
    monkeypatch.setattr("tests.support.host_cache.simulated_copies.ROW", ROW - 16)
    small = Rig(True, strided=CudaDriver(PretendedCuda(), 0), staging_rows=1)
    assert not small.engine.staged
    assert small.engine._rows.ring is None


def _worker(staging_bytes: int = 0) -> HiCacheWorker:
    group = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, PAGE, ("layers.0",))
    geometry = Geometry((group,), PoolShape(2, PAGE, 1), None, 1, 1, False, frozenset())
    return HiCacheWorker(geometry, 0, 4, staging_bytes=staging_bytes)


def test_bytes_are_reported_by_their_way(rig: _Rows) -> None:
    worker = _worker()
    worker._engine = rig.engine
    rig.submit("whole", MIXED)
    rig.engine.drain()
    worker.results(HiCacheMetadata())
    report = worker.take_report()
    assert report is not None
    report.aggregate(HiCacheReport(loads=Transferred(bytes=5, staged_bytes=4)))
    assert report.loads.bytes == 7 * rig.slot_bytes + 5
    assert report.loads.strided_bytes == 3 * rig.slot_bytes
    assert report.loads.staged_bytes == 3 * rig.slot_bytes + 4
    counters = worker.counters()
    assert counters["load_staged_bytes"] == counters["load_strided_bytes"] == 3 * rig.slot_bytes
    assert counters["staged_loads"] is True
    assert "load_staged_bytes" in COUNTERS


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("staging_bytes", "fails", "staged"),
    [(48 << 20, False, True), (48 << 20, True, False), (0, False, False)],
)
def test_a_worker_goes_on_without_the_memory(
    monkeypatch: pytest.MonkeyPatch, staging_bytes: int, fails: bool, staged: bool
) -> None:
    said: list[str] = []
    asked: list[int] = []

    def allocate(num_bytes: int) -> StagingRing:
        asked.append(num_bytes)
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return StagingRing(torch.empty(num_bytes, dtype=torch.uint8))

    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(StagingRing, "allocate", allocate)
    monkeypatch.setattr(CudaDriver, "load", lambda device: CudaDriver(PretendedCuda(), device))
    worker = _worker(staging_bytes)
    assert worker.counters()["staged_loads"] is False
    rig = Rig(True)
    pools = {0: group_layers(list(rig.caches), rig.caches, 16)}
    worker._engine = worker._stream_engine(pools, rig.shard)
    assert worker.counters()["staged_loads"] is staged
    assert worker.counters()["strided_copies"] is True
    assert asked == ([staging_bytes] if staging_bytes else [])
    assert len(said) == fails
    if fails:
        assert "kv_connector_extra_config.staging_bytes" in said[0]
