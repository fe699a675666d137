"""Engines whose host has another form: a hit loads the computed K/V, rounded or bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.cache_engines import generate, metrics, prompts, stored, transfer
from tests.support.samples.fp8_numbers import back, rounded
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.copies import packed_pages
from vllm_graft.hicache.copies.copy_engine import MemoryCopyEngine
from vllm_graft.hicache.messages.operation import CacheOperation, Direction
from vllm_graft.hicache.rank import worker
from vllm_graft.hicache.rank.worker import HiCacheWorker
from vllm_graft.testing import cpu_engine, model_runner

pytestmark = pytest.mark.engine

PROMPTS = prompts(1, 200, 100, 65, 33)
HITS = [192, 96, 64, 32]


class _Watch:
    """Record blocks by slot, as they were when stored, and as loads leave them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.caches: list[torch.Tensor] = []
        self.stored: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.loaded: dict[tuple[int, int], list[torch.Tensor]] = {}

    def blocks(self, operation: CacheOperation) -> dict[tuple[int, int], list[torch.Tensor]]:
        return {
            (part.group, slot): [cache[block].clone() for cache in self.caches]
            for part in operation.transfers
            for slot, block in zip(part.host_indices, part.device_indices)
        }


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> _Watch:
    watch = _Watch()
    register, copy = HiCacheWorker.register, MemoryCopyEngine._copy

    def registered(self: Any, caches: Any, hooked: Any) -> None:
        watch.caches = [cache.unflatten(0, (self._num_blocks, -1)) for cache in caches.values()]
        register(self, caches, hooked)

    def copied(self: Any, operation: CacheOperation) -> None:
        if operation.direction is Direction.STORE:
            watch.stored |= watch.blocks(operation)
        copy(self, operation)
        if operation.direction is Direction.LOAD:
            watch.loaded |= watch.blocks(operation)

    monkeypatch.setattr(worker, "info_once", watch.log.append)
    monkeypatch.setattr(HiCacheWorker, "register", registered)
    monkeypatch.setattr(MemoryCopyEngine, "_copy", copied)
    return watch


@pytest.mark.usefixtures("reads_pay")
def test_a_hit_is_the_computed_kv_rounded(llama: Path, watch: _Watch, tmp_path: Path) -> None:
    options = stored(tmp_path) | {"host_dtype": "fp8"}
    with cpu_engine(llama, kv_transfer_config=transfer(**options), dtype="bfloat16") as llm:
        assert generate(llm, PROMPTS)[1] == [0, 0, 0, 0]
        assert llm.reset_prefix_cache()
        tokens, cached = generate(llm, PROMPTS)
        assert cached == HITS
        assert len(watch.loaded) == sum(HITS) // 32
        _check_blocks(watch, torch.bfloat16)
        assert metrics(llm)["hit_tokens_host"] == sum(HITS)
        # The same pages give the same tokens again.
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == (tokens, HITS)
        _check_bytes(llm, watch, len(watch.loaded))
    with cpu_engine(llama, kv_transfer_config=transfer(**options), dtype="bfloat16") as llm:
        assert generate(llm, PROMPTS) == (tokens, HITS)
        assert metrics(llm)["hit_tokens_storage"] == sum(HITS)
    plain = transfer(**{**options, "host_dtype": None})
    with cpu_engine(llama, kv_transfer_config=plain, dtype="bfloat16") as llm:
        assert generate(llm, PROMPTS)[1] == [0, 0, 0, 0], "fp8 pages are another namespace's"


def _check_blocks(watch: _Watch, dtype: torch.dtype) -> None:
    assert watch.loaded
    changed = 0
    for page, layers in watch.loaded.items():
        for found, computed in zip(layers, watch.stored[page], strict=True):
            assert found.dtype is dtype
            assert torch.equal(found, back(rounded(computed), dtype))
            assert found.any()
            changed += int((found != computed).sum())
    assert changed, "these numbers lose nothing as fp8"


def _check_bytes(llm: Any, watch: _Watch, pages: int, item: float = 1) -> None:
    """Check that an element takes so many bytes, in slots and in the metrics."""
    elements = sum(cache[0].numel() for cache in watch.caches)
    rank = model_runner(llm).kv_connector.kv_connector.worker
    assert rank._geometry.groups[0].page_bytes == elements * item
    assert rank.counters()["load_bytes"] == 2 * pages * elements * item


@pytest.mark.usefixtures("reads_pay")
def test_a_packed_hit_is_the_computed_kv(llama: Path, watch: _Watch, tmp_path: Path) -> None:
    """A hit gives the tokens that one of the device's own bytes gives."""
    options = stored(tmp_path) | {"host_dtype": "packed"}
    plain = transfer(**{**options, "host_dtype": None})
    with cpu_engine(llama, kv_transfer_config=plain, dtype="bfloat16") as llm:
        generate(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        tokens, cached = generate(llm, PROMPTS)
        assert cached == HITS
    watch.stored.clear()
    watch.loaded.clear()
    with cpu_engine(llama, kv_transfer_config=transfer(**options), dtype="bfloat16") as llm:
        assert "packed without loss" in watch.log[-1]
        assert generate(llm, PROMPTS)[1] == [0, 0, 0, 0], "packed pages are another namespace's"
        for _ in range(2):
            assert llm.reset_prefix_cache()
            assert generate(llm, PROMPTS) == (tokens, HITS)
        assert len(watch.loaded) == sum(HITS) // 32
        for page, layers in watch.loaded.items():
            for found, computed in zip(layers, watch.stored[page], strict=True):
                assert found.any()
                assert torch.equal(found.view(torch.int16), computed.view(torch.int16))
        _check_bytes(llm, watch, len(watch.loaded), 99 / 64)
        assert metrics(llm).get("unfit_pages", 0) == 0
    with cpu_engine(llama, kv_transfer_config=transfer(**options), dtype="bfloat16") as llm:
        assert generate(llm, PROMPTS) == (tokens, HITS)
        assert metrics(llm)["hit_tokens_storage"] == sum(HITS)


def test_a_page_that_does_not_fit_is_computed_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first store's third page is marked as one that does not fit; the next store has it."""
    runs = 0

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        nonlocal runs
        runs += 1
        packed = stock(numbers)
        packed[-1] = runs == 3
        return packed

    stock = packed_pages.pack
    monkeypatch.setattr(packed_pages, "pack", pack)
    options = transfer(host_dtype="packed", load="async")
    with cpu_engine(llama, kv_transfer_config=options, dtype="bfloat16") as llm:
        found = []
        for _ in range(3):
            found.append(generate(llm, PROMPTS[:1])[1])
            assert llm.reset_prefix_cache()
        assert found == [[0], [64], [192]]
        assert metrics(llm)["unfit_pages"] == 1


def test_states_are_refused(recurrent: Path) -> None:
    options = transfer(host_dtype="fp8")
    with (
        pytest.raises(ConfigError, match=r"host_dtype is fp8, but the model has recurrent states"),
        cpu_engine(
            recurrent, kv_transfer_config=options, max_model_len=512, enable_prefix_caching=True
        ),
    ):
        pass


def test_windows_are_kept_as_fp8_too(sliding: Path, watch: _Watch) -> None:
    batch = prompts(2, 300, 130, 70)
    options = transfer(host_dtype="fp8", load="layerwise")
    with cpu_engine(sliding, kv_transfer_config=options, max_model_len=512) as llm:
        assert ["lossy" in line for line in watch.log] == [True]
        assert generate(llm, batch)[1] == [0, 0, 0]
        assert llm.reset_prefix_cache()
        tokens, cached = generate(llm, batch)
        assert cached == [288, 128, 64]
        _check_blocks(watch, torch.float32)
        assert llm.reset_prefix_cache()
        assert generate(llm, batch) == (tokens, cached)
        assert metrics(llm)["loads_layerwise"] == 6
