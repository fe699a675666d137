"""Copies on real streams: bytes arrive, in both directions or through buffers, and never late."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.host_cache.gpu_copies import BLOCKS, DELAY, LAYERS, SLOTS, GpuRig
from tests.support.host_cache.submitted_loads import LOAD_WAYS, submit_load
from tests.support.samples.fp8_numbers import DTYPES, back, numbers, rounded, same
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.host_form import FP8

pytestmark = pytest.mark.gpu


ORDERS = ["LBHNC", "BLHNC", "LHBNC"]
PAGE = 4 * 16 * 64 * 4
"""Bytes of a layer's page."""

CHUNK_ROWS = 4
"""How many pages of a layer a buffer holds."""

SLOT_LIST = list(range(SLOTS))
TARGETS = {
    "reversed": [BLOCKS - 1 - slot for slot in SLOT_LIST],
    "random": random.Random(5).sample(range(BLOCKS), SLOTS),
    # Memory is pinned in pieces; the slots of the first piece are copied straight.
    "mixed": [
        *range(20, 29),
        *(60, 3, 58, 5, 56, 7, 54, 9, 52),
        *range(19, 10, -1),
        *(30, 35, 31, 36, 32),
    ],
}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make rigs: plain ones, or with 2D copies of five rows and more, also with small buffers."""
    from vllm_graft.hicache.copies import page_kernel, strided
    from vllm_graft.hicache.copies.cuda_driver import CudaDriver
    from vllm_graft.hicache.copies.row_copies import BUFFERS, StagingRing
    from vllm_graft.hicache.pages import pool_shape

    made: list[GpuRig] = []
    # It is compiled before, or delays would be over by then.
    page_kernel.warm_up()
    monkeypatch.setattr(pool_shape, "PIN_BYTES", 9 * LAYERS * PAGE)

    def build(order: str = "LBHNC", delay: int = 0, kind: str = "staged") -> GpuRig:
        # Heads are outermost in one order: a page of a layer is four rows there.
        width = PAGE // 4 if order == "LHBNC" else PAGE
        monkeypatch.setattr(strided, "LEAST_BYTES", 5 * width)
        ring = StagingRing.allocate(BUFFERS * CHUNK_ROWS * PAGE) if kind == "staged" else None
        driver = None if kind == "plain" else CudaDriver.load(torch.cuda.current_device())
        rig = GpuRig(order, delay, driver=driver, ring=ring)
        made.append(rig)
        return rig

    yield build
    for rig in made:
        rig.close()


@pytest.fixture
def late(make: Any) -> GpuRig:
    rig: GpuRig = make(delay=DELAY, kind="plain")
    return rig


def test_a_fence_outlasts_a_slow_store(make: Any) -> None:
    rig = make(kind="plain")
    for cache in rig.caches.values():
        cache[5] = 7.0
    with torch.cuda.stream(rig.engine._streams[Direction.STORE]):
        torch.cuda._sleep(DELAY)
    rig.engine.store(rig.operation(Direction.STORE, [2], [5]))
    rig.engine.fence([0])
    for cache in rig.caches.values():
        cache[5] = -1.0
    rig.engine.drain()
    assert (rig.slot(2) == 7.0).all()


def _graph(rig: GpuRig, block: int) -> tuple[Any, torch.Tensor]:
    """Capture a graph that sums up the block in every layer, as attention would read it."""
    sums = torch.zeros(LAYERS, device="cuda")

    def read() -> None:
        for number, cache in enumerate(rig.caches.values()):
            sums[number] = cache[block].sum()

    read()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read()
    return graph, sums


@pytest.mark.parametrize("whole", [True, False])
def test_a_full_graph_reads_what_was_loaded_for_it(late: GpuRig, whole: bool) -> None:
    block = 9
    graph, sums = _graph(late, block)
    size = late.page // 4 // LAYERS
    for step in range(1, 40):
        late.slot(0)[:] = float(step)
        load = late.operation(Direction.LOAD, [0], [block])
        if whole:
            late.engine.load_now(load)
        else:
            late.engine.load_layers(load, first=())
            assert late.engine.wait_all_layers() == LAYERS
        graph.replay()
        assert sums.tolist() == [float(step) * size] * LAYERS


def test_without_the_wait_a_full_graph_reads_old_bytes(late: GpuRig) -> None:
    """Negative control: the delay is long enough to be seen."""
    block = 9
    graph, sums = _graph(late, block)
    late.slot(0)[:] = 3.0
    late.engine.load_layers(late.operation(Direction.LOAD, [0], [block]), first=())
    graph.replay()
    assert 0.0 in sums.tolist()
    late.engine.wait_all_layers()


def test_an_async_load_runs_beside_the_step(late: GpuRig) -> None:
    late.slot(6)[:] = 5.0
    late.engine.begin_step()
    torch.cuda._sleep(20 * DELAY)
    behind = torch.cuda.Event()
    behind.record()
    late.engine.load(late.operation(Direction.LOAD, [6], [20]))
    late.engine.drain()
    assert not behind.query(), "the load did not wait for the step's own work"
    assert all((cache[20] == 5.0).all() for cache in late.caches.values())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", LOAD_WAYS)
def test_fp8_there_and_back(order: str, dtype: torch.dtype, way: str) -> None:
    """Pages equal torch's cast, on the host and back; other blocks stay as they are."""
    rig = GpuRig(order, dtype=dtype, form=FP8)
    values = numbers(dtype)
    for cache in rig.caches.values():
        picked = torch.randint(len(values), cache.shape)
        cache.copy_(values[picked])
    before = {name: cache.cpu() for name, cache in rig.caches.items()}
    slots, blocks = [7, 8, 9, 1, 30], [3, 4, 5, 40, 17]
    rig.engine.store(rig.operation(Direction.STORE, slots, blocks))
    rig.engine.fence([0])
    for cache in rig.caches.values():
        cache[blocks] = -1.0
    rig.load(way, slots, blocks)
    results = rig.engine.finished()
    assert [result.failed for result in results] == [False, False]
    assert rig.page == LAYERS * 4 * 16 * 64
    assert all(result.num_bytes == len(blocks) * rig.page for result in results)
    for name, cache in rig.caches.items():
        found, expected = cache.cpu(), before[name].clone()
        expected[blocks] = back(rounded(before[name][blocks]), dtype)
        assert same(found, expected)
    stored = torch.cat(
        [torch.frombuffer(rig.pool.page(0, s, rig.page), dtype=torch.uint8) for s in slots]
    )
    expected = torch.cat([rounded(cache[blocks]).reshape(-1) for cache in before.values()])
    # A slot has the layers one after the other, heads and tokens in the device's order.
    assert torch.equal((stored & 0x7F).sort().values, (expected & 0x7F).sort().values)
    rig.close()


def test_fp8_runs_that_are_not_aligned() -> None:
    """Runs have 12 elements; the kernel copies them as well, because no copy engine converts."""
    whole = torch.randn(4, BLOCKS, 3, 20, device="cuda", dtype=torch.bfloat16)
    caches = {f"layers.{n}.attn": whole[n, :, :, 1:13] for n in range(4)}
    rig = GpuRig.of(caches, FP8)
    before = whole.cpu()
    rig.engine.store(rig.operation(Direction.STORE, [0, 5], [9, 2]))
    rig.engine.fence([0])
    whole[:, [9, 2], :, 1:13] = 0
    rig.engine.load_now(rig.operation(Direction.LOAD, [0, 5], [9, 2]))
    torch.cuda.synchronize()
    expected = before.clone()
    kept = before[:, [9, 2], :, 1:13]
    expected[:, [9, 2], :, 1:13] = back(rounded(kept), torch.bfloat16)
    assert torch.equal(whole.cpu(), expected)
    assert rig.engine.second_tries == 0
    rig.close()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", LOAD_WAYS)
@pytest.mark.parametrize("delay", [0, DELAY])
@pytest.mark.parametrize("kind", ["plain", "strided"])
def test_there_and_back(make: Any, order: str, way: str, delay: int, kind: str) -> None:
    """There are two runs and a single block, memory is pinned in pieces, and other bytes stay."""
    rig, strided = make(order, delay, kind), kind == "strided"
    for cache in rig.caches.values():
        cache.copy_(torch.randn(cache.shape, device="cuda"))
    before = {name: cache.clone() for name, cache in rig.caches.items()}
    blocks = [*range(3, 15), 40, *range(50, 60)]
    slots = [*range(2, 14), 31, *range(16, 26)]
    rig.engine.store(rig.operation(Direction.STORE, slots, blocks))
    rig.engine.fence([0])
    for cache in rig.caches.values():
        cache[blocks] = -1.0
    # These are other blocks than the stored ones, in other runs.
    targets = [*range(20, 32), 1, *range(34, 39), *range(45, 50)]
    rig.engine.begin_step()
    submit_load(rig.engine, way, rig.operation(Direction.LOAD, slots, targets))
    if way == "async":
        rig.engine.drain()
    for name, cache in rig.caches.items():
        rig.engine.wait_layer(name)
        expected = before[name].clone()
        expected[targets] = before[name][blocks]
        expected[blocks] = -1.0
        assert torch.equal(cache, expected), name
    rig.engine.drain()
    torch.cuda.synchronize()
    results = rig.engine.finished()
    assert [result.failed for result in results] == [False, False]
    assert all(result.num_bytes == len(blocks) * rig.page for result in results)
    # Blocks whose layers lie together are long copies already, unless layers are asked for.
    whole = order == "BLHNC"
    for result in results:
        layers = way == "layers" and result.operation.direction is Direction.LOAD
        partly = strided and (layers or not whole)
        assert (0 < result.strided_bytes < result.num_bytes) is partly
        assert strided or result.strided_bytes == 0
    assert rig.engine.second_tries == 0
    assert rig.engine.strided is strided


def test_a_2d_copy_that_cuda_refuses_is_done_in_another_way(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We check no pitch here, so the driver has to refuse the copy."""
    rig = make(kind="strided")
    planner = rig.engine._rows._planner
    plan = planner.plan

    def wrong(*arguments: Any) -> Any:
        part = plan(*arguments)
        assert part is not None
        part.copies.host_pitch[:] = 1  # This is less than the width of a row.
        return part

    monkeypatch.setattr(planner, "plan", wrong)
    slots = list(range(8))
    for slot in slots:
        rig.slot(slot)[:] = float(slot + 1)
    rig.engine.load_layers(rig.operation(Direction.LOAD, slots, slots), first=())
    rig.engine.wait_all_layers()
    for cache in rig.caches.values():
        assert cache[:8].flatten(1).mean(1).tolist() == [float(slot + 1) for slot in slots]
    assert rig.engine.second_tries == 1
    assert not rig.engine.strided


def _fill(rig: GpuRig, slots: list[int], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for slot in slots:
        rig.slot(slot)[:] = torch.randn(rig.page // 4, generator=generator)


def _expected(rig: GpuRig, slots: list[int], blocks: list[int]) -> dict[str, torch.Tensor]:
    """Load these pages by the copy engine of a rig without 2D copies, and return its caches."""
    other = GpuRig(rig.order)
    for slot in slots:
        other.slot(slot)[:] = rig.slot(slot)
    other.load("async", slots, blocks)
    assert [result.staged_bytes for result in other.engine.finished()] == [0]
    found = {name: cache.clone() for name, cache in other.caches.items()}
    other.close()
    return found


def _submit(rig: GpuRig, way: str, slots: list[int], blocks: list[int]) -> None:
    submit_load(rig.engine, way, rig.operation(Direction.LOAD, slots, blocks))
    if way == "async":
        rig.engine.drain()


def _same(rig: GpuRig, expected: dict[str, torch.Tensor]) -> None:
    """Compare each layer, read by the compute stream as soon as it may."""
    copies = {}
    for name, cache in rig.caches.items():
        rig.engine.wait_layer(name)
        copies[name] = cache.clone()
    for name, cache in copies.items():
        assert torch.equal(cache, expected[name]), name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", LOAD_WAYS)
@pytest.mark.parametrize(
    ("kind", "targets"), [("plain", "reversed"), *(("staged", name) for name in TARGETS)]
)
@pytest.mark.parametrize("delay", [0, DELAY])
def test_loads_bring_the_bytes(
    make: Any, order: str, way: str, kind: str, targets: str, delay: int
) -> None:
    """There are more chunks than buffers; other blocks stay as they are."""
    rig, blocks = make(order, delay, kind), TARGETS[targets]
    _fill(rig, SLOT_LIST)
    expected = _expected(rig, SLOT_LIST, blocks)
    rig.engine.begin_step()
    _submit(rig, way, SLOT_LIST, blocks)
    _same(rig, expected)
    rig.engine.drain()
    torch.cuda.synchronize()
    (result,) = rig.engine.finished()
    assert not result.failed
    assert result.num_bytes == SLOTS * rig.page
    # Blocks whose layers lie together are long copies already, unless layers are asked for.
    if kind == "plain" or (order == "BLHNC" and way != "layers"):
        assert result.staged_bytes == 0
    elif targets == "mixed":
        assert result.strided_bytes == 9 * rig.page
        assert result.staged_bytes == 23 * rig.page
    else:
        assert result.staged_bytes + result.strided_bytes == result.num_bytes
        assert result.staged_bytes >= 27 * rig.page
    assert rig.engine.second_tries == 0
    assert rig.engine.staged is rig.engine.strided is (kind == "staged")


def _hold_up(rig: GpuRig) -> None:
    """Delay the kernels that empty buffers."""
    with torch.cuda.stream(rig.engine._rows.ring.stream):
        torch.cuda._sleep(3 * DELAY)


@pytest.mark.parametrize("way", LOAD_WAYS)
@pytest.mark.parametrize("held", ["copies", "kernels", "both"])
def test_whoever_is_late_is_waited_for(make: Any, way: str, held: str) -> None:
    rig, blocks = make(delay=0 if held == "kernels" else DELAY), TARGETS["random"]
    _fill(rig, SLOT_LIST)
    expected = _expected(rig, SLOT_LIST, blocks)
    rig.engine.begin_step()
    if held != "copies":
        _hold_up(rig)
    _submit(rig, way, SLOT_LIST, blocks)
    _same(rig, expected)


def test_without_its_wait_a_buffer_is_overwritten(make: Any) -> None:
    """Negative control: kernels are late enough to be seen."""
    rig, blocks = make(), TARGETS["random"]
    _fill(rig, SLOT_LIST)
    expected = _expected(rig, SLOT_LIST, blocks)
    ring = rig.engine._rows.ring
    stock = ring.through

    def careless(*arguments: Any) -> None:
        # Waiting for an event that was never recorded returns at once.
        ring._emptied = [torch.cuda.Event() for _ in ring._emptied]
        stock(*arguments)

    ring.through = careless
    rig.engine.begin_step()
    _hold_up(rig)
    rig.engine.load(rig.operation(Direction.LOAD, SLOT_LIST, blocks))
    rig.engine.drain()
    torch.cuda.synchronize()
    wrong = [name for name, cache in rig.caches.items() if not torch.equal(cache, expected[name])]
    assert wrong


def test_layers_beside_a_busy_device(make: Any) -> None:
    """Matrices are multiplied before each layer is read, as in a step; steps follow each other."""
    rig = make()
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    expected = []
    for step in range(6):
        _fill(rig, SLOT_LIST, seed=step)
        expected.append(_expected(rig, SLOT_LIST, TARGETS["random"]))
    seen: list[dict[str, torch.Tensor]] = []
    for step in range(6):
        torch.cuda.synchronize()  # Nothing reads the slots of the last step any more.
        _fill(rig, SLOT_LIST, seed=step)
        rig.engine.begin_step()
        for _ in range(4):
            matrix @ matrix
        load = rig.operation(Direction.LOAD, SLOT_LIST, TARGETS["random"])
        rig.engine.load_layers(load, first=())
        layers = {}
        for name, cache in rig.caches.items():
            for _ in range(2):
                matrix @ matrix
            rig.engine.wait_layer(name)
            layers[name] = cache.clone()
        seen.append(layers)
    for step, layers in enumerate(seen):
        for name, cache in layers.items():
            assert torch.equal(cache, expected[step][name]), (step, name)
    rig.engine.drain()
    assert [result.failed for result in rig.engine.finished()] == [False] * 6
