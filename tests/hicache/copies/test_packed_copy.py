"""K/V that the host keeps packed: every bit comes back, or the page is not kept."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.samples.packed_numbers import computed, every_number, packed, spread, usual
from vllm_graft.hicache.copies import packed_kernel
from vllm_graft.hicache.copies.copy_engine import MemoryCopyEngine
from vllm_graft.hicache.copies.packed_pages import pack, packed_copy, unfit, unpack
from vllm_graft.hicache.copies.page_kernel import fits
from vllm_graft.hicache.copies.strided import HostShard
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.host_form import PACKED
from vllm_graft.hicache.pages.layout import Copies, group_layers, pages_bytes
from vllm_graft.hicache.pages.pool_shape import PoolShape
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key

GAP = 64
SPECIAL = torch.tensor(
    # Zeros, denormals, infinities, and NaN that are quiet, that signal, and with payloads.
    [0, 0x8000, 1, 0x8001, 0x7F, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFAA, 0x7FFF]
)


def _kernel(runs: Copies, direction: Direction) -> Callable[[int, int], None]:
    assert fits(runs)
    with mock.patch.object(packed_kernel, "on_device", torch.from_numpy):
        return packed_kernel.convert_runs(runs, direction)


def _unaligned(runs: Copies, direction: Direction) -> Callable[[int, int], None]:
    with (
        mock.patch.object(packed_kernel, "on_device", torch.from_numpy),
        mock.patch.object(packed_kernel, "fits", return_value=False),
    ):
        return packed_kernel.convert_runs(runs, direction)


COPIES = pytest.mark.parametrize(
    "copy", [packed_copy, _kernel, _unaligned], ids=["memory", "kernel", "unaligned"]
)


def _runs(device: torch.Tensor, host: torch.Tensor, counts: list[int]) -> Copies:
    """Runs of so many numbers, on either side a gap apart."""
    sizes = np.array([PACKED.num_bytes(count) for count in counts])
    gaps = GAP * np.arange(len(counts))
    return Copies(
        device.data_ptr() + 2 * (np.cumsum([0, *counts[:-1]]) + gaps),
        host.data_ptr() + np.cumsum([0, *sizes[:-1]]) + gaps,
        sizes,
    )


def _through(copy: Any, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """What comes back of one run, its bytes on the host, and whether it fits."""
    host = torch.full((PACKED.num_bytes(len(numbers)),), 0xEE, dtype=torch.uint8)
    runs = _runs(numbers, host, [len(numbers)])
    copy(runs, Direction.STORE)(0, 1)
    found = torch.full_like(numbers, 0x1234)
    if not unfit(runs)[0]:
        copy(_runs(found, host, [len(numbers)]), Direction.LOAD)(0, 1)
    return found, host, not unfit(runs)[0]


@COPIES
def test_every_number_comes_back(copy: Any) -> None:
    numbers = every_number()
    assert len(numbers.unique()) == 1 << 16
    found, host, fit = _through(copy, numbers)
    assert fit
    assert torch.equal(found, numbers)
    # Some have escaped: the list is not empty.
    assert host[1552 * 64 :].any()


@COPIES
@pytest.mark.parametrize("value", SPECIAL.tolist())
def test_special_values_come_back(copy: Any, value: int) -> None:
    numbers = usual(9216, value)
    numbers[[0, 77, 4095, 4096, 9215]] = torch.tensor(value).to(torch.int16)
    found, _, fit = _through(copy, numbers)
    assert fit
    assert torch.equal(found, numbers)
    same = torch.full((1024,), value).to(torch.int16)
    found, _, fit = _through(copy, same)
    assert fit is (value & 0x7F80 < 0x7F80), "no exponent of NaN and infinities is near another"
    assert torch.equal(found, same) is fit


@pytest.mark.parametrize("aligned", [True, False])
def test_a_warm_up_writes_nothing(aligned: bool) -> None:
    """It launches a run of no numbers, in front of which there may be nobody's memory."""
    host = torch.full((64,), 0xEE, dtype=torch.uint8)
    table = torch.tensor([[host.data_ptr() + 16], [host.data_ptr() + 32], [0]])
    packed_kernel.launch(table, 0, 1, Direction.STORE, aligned)
    assert (host == 0xEE).all()


@COPIES
def test_bytes_are_those_of_the_format(copy: Any) -> None:
    """Every copy writes the same bytes, whatever was in the slot, so that pages and ranks agree."""
    for numbers in (usual(6144), usual(1024) // 7, spread(1024), SPECIAL.repeat(1024)[:1024]):
        numbers = numbers.to(torch.int16)
        expected, fit = packed(numbers)
        _, host, fitted = _through(copy, numbers)
        assert fitted is fit
        assert host.tolist() == expected


@COPIES
@pytest.mark.parametrize("more", [0, 1])
def test_a_run_fits_until_its_list_is_full(copy: Any, more: int) -> None:
    numbers = torch.full((2048,), 0x3F80, dtype=torch.int16)
    escaping = random.Random(more).sample(range(2048), 63 + more)
    numbers[escaping] = torch.arange(63 + more).to(torch.int16)
    found, host, fit = _through(copy, numbers)
    assert fit is not more
    assert host[-1] == more
    assert torch.equal(found, numbers) is not more


@pytest.mark.parametrize("direction", Direction)
@COPIES
def test_runs_of_a_range_arrive_and_nothing_else_changes(copy: Any, direction: Direction) -> None:
    counts = [1024, 2048, 9216, 5120, 1024]
    if copy is not _kernel:
        counts[1] = 64 * 37
    device = usual(sum(counts) + GAP * len(counts))
    host = usual(len(device), 1).view(torch.uint8)
    runs = _runs(device, host, counts)
    parts = [
        (slice(at, at + count), slice(to, to + size))
        for at, to, count, size in zip(
            ((runs.device - device.data_ptr()) // 2).tolist(),
            (runs.host - host.data_ptr()).tolist(),
            counts,
            runs.sizes.tolist(),
        )
    ]
    for _, there in parts:
        host[there] = pack(usual(PACKED.unit * (there.stop - there.start) // 99, 2))
    expected, other = device.clone(), host.clone()
    for here, there in parts[1:4]:
        if direction is Direction.STORE:
            other[there] = pack(device[here])
        else:
            expected[here] = unpack(host[there])
    copy(runs, direction)(1, 4)
    assert torch.equal(device, expected)
    assert torch.equal(host, other)


def test_a_wrong_byte_is_another_page() -> None:
    """The negative control of all comparisons here: the format has no byte without a meaning."""
    numbers = every_number(3)[20_000:24_096]
    whole = pack(numbers)
    listed = int(whole[1552 * 4 : -1].count_nonzero())
    assert listed > 20
    for at in (17, 4096 + 17, 6144 + 17, 1552 * 4 + 17):
        wrong = whole.clone()
        wrong[at] ^= 0x11
        assert not torch.equal(unpack(wrong), numbers)
    moved = whole.clone()
    moved[1552 * 4 + 1 : -1] = whole[1552 * 4 : -2]
    assert not torch.equal(unpack(moved), numbers)


class _Way:
    """The way of pages of K/V, from a device of 64 blocks to storage and back."""

    def __init__(self, pages: torch.Tensor, path: Path) -> None:
        count, layers = pages.shape[:2]
        shape = (2 * count, *pages.shape[2:])
        self.caches = {
            f"layers.{n}": torch.zeros(shape, dtype=torch.bfloat16) for n in range(layers)
        }
        pools = {0: group_layers(list(self.caches), self.caches, 2 * count, PACKED)}
        self.size = pages_bytes(pools[0])
        assert 128 * self.size == 99 * pages[0].nbytes
        self.pool = HostPool(PoolShape.fit(count * (self.size + 4096), self.size, 1))
        shard = HostShard.of(self.pool, 0)
        self.engine = MemoryCopyEngine(pools, shard, packed_copy, unfit)
        options = {"path": path, "max_bytes": "1GiB"}
        self.store = SegmentsBackend(NAMESPACE, options)
        self.count, self.keys = count, [page_key(number) for number in range(count)]

    def blocks(self, begin: int) -> list[torch.Tensor]:
        """The K/V of half of the blocks, layer by layer, as bits."""
        part = slice(begin, begin + self.count)
        return [cache.view(torch.int16)[part] for cache in self.caches.values()]

    def write(self, pages: torch.Tensor) -> list[int]:
        """Bring pages to storage by way of the host; return the slots of those that don't fit."""
        for number, cache in enumerate(self.blocks(0)):
            cache.copy_(pages[:, number])
        slots = list(range(self.count))
        self.engine.store(CacheOperation([0], Direction.STORE, [PoolTransfer(0, slots, slots)]))
        (result,) = self.engine.finished()
        assert not result.failed
        for slot, key in enumerate(self.keys):
            page = self.pool.page(0, slot, self.size)
            assert slot in result.unfit or self.store.write(key, page)
            page[:] = bytes(self.size)
        return result.unfit

    def read(self) -> torch.Tensor:
        """Bring pages back to other blocks; return whether storage has each of them."""
        slots, there = list(range(self.count)), []
        for slot, key in enumerate(self.keys):
            page = self.pool.page(0, slot, self.size)
            there.append(self.store.read(key, page) is ReadStatus.HIT)
            if not there[-1]:
                page[:] = pack(usual(self.size // 99 * 64)).numpy().tobytes()
        blocks = [self.count + slot for slot in slots]
        self.engine.load(CacheOperation([1], Direction.LOAD, [PoolTransfer(0, slots, blocks)]))
        assert [result.failed for result in self.engine.finished()] == [False]
        return torch.tensor(there)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_computed_pages_come_back_from_storage(count: int, tmp_path: Path) -> None:
    pages, seen = computed(count), 0
    numbers = random.Random(count)
    for part in pages.split(500):
        flat = part.view(-1)
        # Some have special values, which K/V rarely has.
        for at in numbers.sample(range(len(flat)), len(flat) // 40_000):
            flat[at] = int(SPECIAL[at % len(SPECIAL)].to(torch.int16))
        way = _Way(part, tmp_path / str(seen))
        assert way.write(part) == []
        assert way.read().all()
        for number, cache in enumerate(way.blocks(way.count)):
            assert torch.equal(cache, part[:, number])
        way.store.close()
        seen += len(part)
    assert seen == count


def test_pages_that_do_not_fit_or_were_changed_are_not_there(tmp_path: Path) -> None:
    pages = computed(64)
    pages[7, 3] = spread(pages[7, 3].numel()).view_as(pages[7, 3])
    pages[50, 0] = spread(pages[50, 0].numel()).view_as(pages[50, 0])
    way = _Way(pages, tmp_path)
    assert way.write(pages) == [7, 50]
    assert (~way.read()).nonzero().flatten().tolist() == [7, 50]
    way.store.flush()
    (data,) = tmp_path.rglob("*.data")
    content, numbers = bytearray(data.read_bytes()), random.Random(0)
    for _ in range(20):
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
    data.write_bytes(content)
    there = way.read()
    assert 42 <= int(there.sum()) < 62
    for number, cache in enumerate(way.blocks(way.count)):
        assert torch.equal(cache[there], pages[there][:, number])
    way.store.close()
