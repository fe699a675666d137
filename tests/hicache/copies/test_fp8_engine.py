"""An engine whose host copies are fp8: a hit loads the computed K/V, rounded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.cache_engines import generate, metrics, prompts, stored, transfer
from tests.support.samples.fp8_numbers import back, rounded
from vllm_graft.base.errors import ConfigError
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


def _check_bytes(llm: Any, watch: _Watch, pages: int) -> None:
    """Check that an element takes one byte, in slots and in the metrics."""
    elements = sum(cache[0].numel() for cache in watch.caches)
    rank = model_runner(llm).kv_connector.kv_connector.worker
    assert rank._geometry.groups[0].page_bytes == elements
    assert rank.counters()["load_bytes"] == 2 * pages * elements


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
