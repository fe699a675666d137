"""Packed K/V on a GPU: the kernel's bytes are the CPU's, and all come back by every way."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.engines.cache_engines import generate, metrics, prompts, stored, transfer
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.host_cache.gpu_copies import LAYERS, GpuRig
from tests.support.host_cache.submitted_loads import LOAD_WAYS
from tests.support.samples.packed_numbers import computed, every_number, spread, usual
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.host_form import PACKED
from vllm_graft.hicache.pages.layout import Copies
from vllm_graft.testing import running

pytestmark = pytest.mark.gpu


def _check(rows: torch.Tensor, shift: int = 0) -> None:
    """Compare rows of bits, one run each, with the CPU's bytes, and load them to other memory.
    ``shift`` numbers and bytes before the rows make addresses that are not aligned."""
    from vllm_graft.hicache.copies.packed_kernel import convert_runs
    from vllm_graft.hicache.copies.packed_pages import pack, unfit

    count, size = rows.shape[1], PACKED.num_bytes(rows.shape[1])
    source = torch.zeros(rows.numel() + shift, dtype=torch.int16, device="cuda")
    source[shift:] = rows.flatten().cuda()
    target = torch.full_like(source, 0x1234)
    host = torch.full((len(rows) * size + shift,), 0xEE, dtype=torch.uint8).pin_memory()
    places = np.arange(len(rows))
    for direction, device in ((Direction.STORE, source), (Direction.LOAD, target)):
        runs = Copies(
            device.data_ptr() + 2 * (shift + count * places),
            host.data_ptr() + shift + size * places,
            np.full(len(rows), size),
        )
        convert_runs(runs, direction)(0, len(runs))
        torch.cuda.synchronize()
    expected = torch.stack([pack(row) for row in rows])
    assert torch.equal(host[shift:].view(len(rows), size), expected)
    assert unfit(runs).tolist() == (expected[:, -1] != 0).tolist()
    fits = torch.from_numpy(~unfit(runs))
    assert torch.equal(target[shift:].view_as(rows).cpu()[fits], rows[fits])
    assert (host[:shift] == 0xEE).all()


@pytest.mark.parametrize("shift", [0, 1])
def test_the_kernel_writes_the_bytes_of_the_cpu(shift: int) -> None:
    _check(every_number()[None], shift)
    for count in (64, 1024, 2048, 4160, 32_768):
        rows = torch.stack([*usual(20 * count).view(20, count), spread(count)])
        rows[:20:3, 5] = torch.tensor(0x7F81, dtype=torch.int16)
        _check(rows, shift)


@pytest.mark.nightly
def test_ten_thousand_computed_pages_come_back() -> None:
    _check(computed(10_000).flatten(2).flatten(0, 1))


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LHBNC"])
@pytest.mark.parametrize("way", LOAD_WAYS)
def test_pages_come_back_by_every_way(order: str, way: str) -> None:
    rig = GpuRig(order, dtype=torch.bfloat16, form=PACKED)
    bits = {name: cache.view(torch.int16) for name, cache in rig.caches.items()}
    for number, cache in enumerate(bits.values()):
        cache.copy_(usual(cache.numel(), number).view(cache.shape))
        cache[17, 0, 0, 3] = 0x7F81
    first = next(iter(bits.values()))
    first[40] = spread(first[40].numel()).view(first[40].shape)
    before = {name: cache.clone() for name, cache in bits.items()}
    slots, blocks = [7, 8, 9, 1, 30], [3, 4, 5, 40, 17]
    rig.engine.store(rig.operation(Direction.STORE, slots, blocks))
    rig.engine.fence([0])
    for cache in bits.values():
        cache[blocks] = -1
    rig.engine.drain()
    (result,) = rig.engine.finished()
    assert (result.failed, result.unfit) == (False, [1])
    assert result.num_bytes == len(blocks) * rig.page
    assert rig.page == LAYERS * 4 * 16 * 99
    slots, blocks = [7, 8, 9, 30], [3, 4, 5, 17]
    rig.load(way, slots, blocks)
    assert [each.failed for each in rig.engine.finished()] == [False]
    for name, cache in bits.items():
        expected = before[name]
        expected[40] = -1
        assert torch.equal(cache, expected)
    rig.close()


@pytest.mark.engine
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_an_engine_answers_as_with_the_devices_bytes(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    batch, found = prompts(3, 600, 250, 90, 40), []
    for form in (None, "packed"):
        options = {**stored(tmp_path), "host_dtype": form, "load": load}
        with running(
            SHIPPED / "target", dtype="bfloat16", block_size=16, enable_prefix_caching=True,
            kv_transfer_config=transfer(**options), max_model_len=1024, disable_log_stats=False,
            kv_cache_memory_bytes=2**28, gpu_memory_utilization=0.3,
        ) as llm:  # fmt: skip
            generate(llm, batch)
            assert llm.reset_prefix_cache()
            found.append(generate(llm, batch))
            assert sum(found[-1][1]) > 900
            assert metrics(llm).get("unfit_pages", 0) == 0
    assert found[0] == found[1]
