"""2D copies on streams that run late, by a stand-in for libcuda that moves bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.host_cache.pretended_cuda import PretendedCuda
from tests.support.host_cache.simulated_copies import LAYERS, Rig
from tests.support.host_cache.submitted_loads import LOAD_WAYS, submit_load
from vllm_graft.base.log import logger
from vllm_graft.hicache.copies import cuda_driver, page_kernel, strided
from vllm_graft.hicache.copies.cuda_driver import (
    DESCRIPTOR,
    CudaDriver,
    CudaDriverError,
    descriptors,
)
from vllm_graft.hicache.copies.strided import StridedCopies
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages import pool_shape
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape
from vllm_graft.hicache.rank.worker import HiCacheWorker
from vllm_graft.testing import simulated

WIDTH = 2 * 16 * 4
"""Bytes of a block and layer of the rig."""

BLOCKS, SLOTS = [4, 5, 6, 7, 12], [1, 2, 3, 4, 7]
"""Four rows, and a single block."""


class _Strided(Rig):
    def __init__(self, host_dtype: torch.dtype = torch.float32) -> None:
        self.cuda = PretendedCuda()
        super().__init__(True, host_dtype, CudaDriver(self.cuda, 0))

    def fill_all(self) -> None:
        for slot in SLOTS:
            self.fill(slot, float(slot))

    def arrived(self, name: str) -> list[bool]:
        cache = self.caches[name]
        return [bool((cache[b] == float(s)).all()) for b, s in zip(BLOCKS, SLOTS)]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Strided]:
    monkeypatch.setattr(strided, "LEAST_BYTES", 3 * WIDTH)
    with simulated():
        yield _Strided()


def test_stores_and_loads_bring_the_bytes(rig: _Strided) -> None:
    for block, slot in zip(BLOCKS, SLOTS):
        rig.write(block, float(slot))
    rig.engine.store(rig.pages(Direction.STORE, BLOCKS, SLOTS, job=5))
    assert not rig.host.any(), "the store runs late"
    rig.engine.begin_step()
    rig.engine.fence([5])
    for block in BLOCKS:
        rig.write(block, -1.0)
    assert all((rig.slot(slot) == float(slot)).all() for slot in SLOTS)
    assert not rig.slot(0).any()
    assert not rig.slot(5).any()
    rig.engine.begin_step()
    rig.engine.load(rig.pages(Direction.LOAD, BLOCKS, SLOTS))
    rig.engine.drain()
    torch.cuda.current_stream().synchronize()
    assert all(rig.arrived(name) == [True] * 5 for name in rig.caches)
    assert rig.cuda.copied == [(Direction.STORE, 4)] * LAYERS + [(Direction.LOAD, 4)] * LAYERS
    for result in rig.engine.finished():
        assert not result.failed
        assert result.num_bytes == 5 * rig.slot_bytes
        assert result.strided_bytes == 4 * rig.slot_bytes


def test_layers_are_there_once_they_are_waited_for(rig: _Strided) -> None:
    rig.fill_all()
    names = list(rig.caches)
    rig.engine.begin_step()
    rig.engine.load_layers(rig.pages(Direction.LOAD, BLOCKS, SLOTS), first={names[2]})
    for name in (names[2], names[0], names[1]):
        assert rig.arrived(name) == [False] * 5
        rig.engine.wait_layer(name)
        assert rig.arrived(name) == [True] * 5, "rows and the block for itself"
    assert rig.engine.wait_all_layers() == 0
    assert rig.cuda.copied == [(Direction.LOAD, 4)] * LAYERS


def test_a_whole_load_is_waited_for(rig: _Strided) -> None:
    rig.fill_all()
    rig.engine.load_now(rig.pages(Direction.LOAD, BLOCKS[:4], SLOTS[:4]))
    assert all(rig.arrived(name) == [True] * 4 + [False] for name in rig.caches)
    assert len(rig.cuda.copied) == LAYERS


@pytest.mark.parametrize("way", [*LOAD_WAYS, "store"])
def test_a_copy_that_the_driver_refuses(rig: _Strided, way: str) -> None:
    """The operation fails, or is done again in its step; the next ones go by other ways."""
    rig.fill_all()
    rig.cuda.fails_at = 2
    direction = Direction.STORE if way == "store" else Direction.LOAD
    operation = rig.pages(direction, BLOCKS, SLOTS)
    assert rig.engine.strided
    if way == "store":
        rig.engine.store(operation)
    else:
        submit_load(rig.engine, way, operation)
    assert not rig.engine.strided
    if way in ("async", "store"):
        assert [result.failed for result in rig.engine.finished()] == [True]
        assert rig.engine.second_tries == 0
        rig.fill_all()
        rig.engine.load_now(rig.pages(Direction.LOAD, BLOCKS, SLOTS))
    else:
        assert rig.engine.second_tries == 1
        assert rig.engine.wait_all_layers() == 0
    assert all(rig.arrived(name) == [True] * 5 for name in rig.caches)
    assert rig.engine.take_incomplete() == []
    rig.engine.drain()
    assert [(r.failed, r.strided_bytes) for r in rig.engine.finished()] == [(False, 0)]
    assert len(rig.cuda.copied) == 1


def test_what_the_host_keeps_as_fp8_has_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "LEAST_BYTES", WIDTH)
    with simulated():
        rig = _Strided(torch.float8_e4m3fn)
        rig.fill_all()
        rig.engine.load_now(rig.pages(Direction.LOAD, BLOCKS, SLOTS))
        assert all(rig.arrived(name) == [True] * 5 for name in rig.caches)
    assert rig.cuda.copied == []
    assert not rig.engine.strided


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
    with simulated(), pytest.raises(CudaDriverError, match=r"failed with 1 .CUDA_ERROR_INV"):
        driver.prepare(StridedCopies(*one), Direction.LOAD)(0, 1)
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-nobody-has.so.1")
    with pytest.raises(CudaDriverError, match=r"libcuda-that-nobody-has.so.1 cannot be used: .*"):
        CudaDriver.load(0)


def test_without_libcuda_other_ways_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    group = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, PAGE, ("layers.0",))
    geometry = Geometry((group,), PoolShape(2, PAGE, 1), None, 1, 1, False, frozenset())
    monkeypatch.setattr(page_kernel, "warm_up", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-nobody-has.so.1")
    worker = HiCacheWorker(geometry, 0, 4)
    with simulated():
        rig = _Strided()
        worker._engine = worker._stream_engine({}, rig.shard)
        assert worker.counters()["strided_copies"] is False
        assert "no 2D copies" in said[0]
        monkeypatch.setattr(CudaDriver, "load", lambda device: CudaDriver(rig.cuda, device))
        worker._engine = worker._stream_engine({}, rig.shard)
        assert worker.counters()["strided_copies"] is True


class _Runtime:
    """A stand-in for the CUDA runtime."""

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
