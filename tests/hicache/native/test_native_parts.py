"""Our store as a plug-in of vLLM's own connector, whose chunks belong to what an engine runs."""

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from tests.support.tier_host import CHUNK_BYTES, CHUNKS, CONTEXT, Host, key, spec
from tests.support.vllm_configs import vllm_config_at
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.pages import engine_core


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    found = Host(tmp_path)
    yield found
    found.tier.shutdown()


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_what_is_stored_is_loaded(host: Host, count: int) -> None:
    expected = host.fill(1)
    keys = [key(number, number % 2) for number in range(count)]
    assert host.lookup(*keys) == [LookupResult.MISS] * count
    stored = host.job(keys, list(range(count)), load=False)
    assert stored.success
    assert stored.transfer_bytes == count * CHUNK_BYTES
    host.memory[:] = 0
    loaded = host.job(keys, list(range(CHUNKS - count, CHUNKS)), load=True)
    assert loaded.success
    assert loaded.successful_keys is None
    assert np.array_equal(host.memory[CHUNKS - count :], expected[:count])
    assert host.lookup(*keys) == [LookupResult.HIT] * count


def test_it_outlives_the_engine_and_new_weights_do_not_see_it(tmp_path: Path) -> None:
    first = Host(tmp_path)
    expected = first.fill(2)
    assert first.job([key(1)], [0], load=False).success
    first.tier.shutdown()
    other = Host(tmp_path, weights="v2")
    assert other.lookup(key(1)) == [LookupResult.MISS]
    other.tier.shutdown()
    again = Host(tmp_path)
    assert again.job([key(1)], [5], load=True).success
    assert np.array_equal(again.memory[5], expected[0])
    again.tier.shutdown()


def test_a_failed_chunk_is_forgotten_and_the_others_kept(host: Host, tmp_path: Path) -> None:
    """No livelock: the same request's next look-up is a miss."""
    expected = host.fill(3)
    keys = [key(1), key(2), key(3)]
    assert host.job(keys, [0, 1, 2], load=False).success
    assert host.tier.store.flush()
    [data] = tmp_path.rglob("*.data")
    content = bytearray(data.read_bytes())
    content[-CHUNK_BYTES // 2] ^= 1
    data.write_bytes(content)
    host.memory[:] = 0
    # One thread stores a job's chunks in order, so the last record is that of key(3).
    result = host.job(keys, [4, 5, 6], load=True)
    assert not result.success
    assert result.successful_keys == (key(1), key(2))
    assert np.array_equal(host.memory[4:6], expected[:2])
    assert host.lookup(*keys) == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]


def test_a_missing_chunk_fails_the_job(host: Host) -> None:
    result = host.job([key(99)], [0], load=True)
    assert not result.success
    assert result.successful_keys is None


def test_a_chunk_out_of_bounds_fails_the_job(host: Host) -> None:
    assert not host.job([key(1)], [CHUNKS], load=False).success
    assert not host.job([key(1)], [CHUNKS], load=True).success
    assert host.lookup(key(1)) == [LookupResult.MISS]


def test_events_of_whole_stores_only(tmp_path: Path) -> None:
    host = Host(tmp_path, spec(events=True), enable_kv_events=True, locality="LOCAL")
    assert host.job([key(1), key(2)], [0, 1], load=False).success
    assert not host.job([key(3), key(4)], [0, CHUNKS], load=False).success
    assert host.job([key(1)], [3], load=True).success
    [event] = host.tier.take_events()
    assert event.keys == [key(1), key(2)]
    assert event.medium is Medium.STORAGE
    assert event.locality is Locality.LOCAL
    assert not event.removed
    assert list(host.tier.take_events()) == []
    host.tier.shutdown()
    silent = Host(tmp_path, enable_kv_events=True)
    assert silent.job([key(5)], [0], load=False).success
    assert list(silent.tier.take_events()) == []
    silent.tier.shutdown()


def test_geometry_makes_the_namespace(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.fill(4)
    assert host.job([key(1)], [0], load=False).success
    host.tier.shutdown()
    for parallel, found in (
        ({"tp_size": 2}, LookupResult.MISS),
        ({"data_parallel_index": 1}, LookupResult.MISS),
        ({"rank": 3}, LookupResult.HIT),
    ):
        other = Host(tmp_path, spec(**parallel))
        assert other.lookup(key(1)) == [found]
        other.tier.shutdown()


def test_topology_free_bytes_are_shared(tmp_path: Path) -> None:
    for tp_size in (2, 4):
        host = Host(tmp_path, spec(tp_size=tp_size, is_parallelism_agnostic=True))
        assert host.lookup(key(1)) == [LookupResult.HIT if tp_size == 4 else LookupResult.MISS]
        assert host.job([key(1)], [0], load=False).success
        host.tier.shutdown()


def test_wrong_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.weights: no engine core .* serves 'test'.*Give a"):
        Host(tmp_path, weights=None)
    with pytest.raises(ConfigError, match=r"storage\.path"):
        Host(Path("/dev/null/x"))
    with pytest.raises(ValueError, match="Locality"):
        Host(tmp_path, locality="near")


def test_shutdown_waits_for_what_runs_and_drops_the_rest(tmp_path: Path) -> None:
    host = Host(tmp_path, n_write_threads=1)
    host.fill(5)
    ids = np.arange(4)
    for number in range(50):
        keys = [key(4 * number + chunk) for chunk in range(4)]
        host.tier.submit_store(TransferJob(number, keys, ids, False, CONTEXT))
    host.tier.shutdown()
    # Jobs that were dropped have ended too, so waiting for the tier's jobs returns.
    host.tier.submit_store(TransferJob(50, [key(300)], np.arange(1), False, CONTEXT))
    host.tier.drain_jobs()
    results = list(host.tier.get_finished_jobs())
    assert sorted(result.job_id for result in results) == list(range(51))
    assert not results[-1].success
    done = {result.job_id for result in results if result.success}
    again = Host(tmp_path)
    for number in done:
        assert again.lookup(key(4 * number)) == [LookupResult.HIT]
    again.tier.shutdown()


def test_beneath_vllms_tiering_manager(tmp_path: Path) -> None:
    """The manager's own loop runs: cascade, eviction from host memory, promotion."""
    host = Host(tmp_path, spec(events=True), enable_kv_events=True)
    region = Mock()
    region.create_kv_memoryview.return_value = memoryview(host.memory)
    primary = CPUPrimaryTierOffloadingManager(num_chunks=2, mmap_region=region)
    manager = TieringOffloadingManager(primary_tier=primary, secondary_tiers=[host.tier])
    step = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())

    def finish() -> None:
        for _ in range(3):
            manager.on_schedule_end(step)
            host.tier.drain_jobs()

    first = [key(1), key(2)]
    manager.on_new_request(CONTEXT)
    expected = host.fill(6)
    stored = manager.prepare_store(first, CONTEXT)
    assert stored is not None
    manager.complete_store(first, CONTEXT)
    finish()
    # Two other chunks take the whole host memory.
    assert manager.prepare_store([key(3), key(4)], CONTEXT) is not None
    manager.complete_store([key(3), key(4)], CONTEXT)
    finish()
    host.memory[:] = 0
    later = ReqContext(req_id="later")
    manager.on_new_request(later)
    for _ in range(5):
        found = [manager.lookup(one, later) for one in first]
        finish()
    assert found == [LookupResult.HIT, LookupResult.HIT]
    slots = manager.prepare_load(first, later)
    assert np.array_equal(host.memory[slots.block_ids], expected[:2])  # type: ignore[attr-defined]
    host.tier.shutdown()


class Core:
    """Stand-in for vLLM's engine core, with the configuration of a model at a path."""

    def __init__(self, path: Path, runs: str = "FlashAttentionBackend") -> None:
        self.vllm_config = vllm_config_at(path)
        self.runs = runs

    def collective_rpc(self, method: Any) -> list[dict[str, list[str]]]:
        return [{self.runs: ["layers.0"]}] * 2


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Core:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(4)}, folder / "model.safetensors")
    made = Core(folder)
    monkeypatch.setattr(engine_core, "_latest", weakref.ref(made))
    return made


def _host(core: Core, **options: Any) -> Host:
    model = Path(core.vllm_config.model_config.model)
    return Host(model.parent / "store", spec(model=str(model)), **options)


def _without_a_change(core: Core) -> None:
    pass


def _rope_by_overrides(core: Core) -> None:
    core.vllm_config.model_config.hf_values["rope_theta"] = 500_000.0


def _quantised_while_loading(core: Core) -> None:
    core.vllm_config.model_config.quantization = "fp8"


def _another_processor(core: Core) -> None:
    (Path(core.vllm_config.model_config.model) / "preprocessor_config.json").write_text("{}")


def _other_attention(core: Core) -> None:
    core.runs = "TorchAttentionBackend"


def _with_adapters(core: Core) -> None:
    core.vllm_config.lora_config = object()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_without_a_change, LookupResult.HIT),
        (_rope_by_overrides, LookupResult.MISS),
        (_quantised_while_loading, LookupResult.MISS),
        (_another_processor, LookupResult.MISS),
        (_other_attention, LookupResult.MISS),
        (_with_adapters, LookupResult.MISS),
    ],
)
def test_inputs_of_the_engine_make_the_namespace(
    core: Core, change: Callable[[Core], None], found: LookupResult
) -> None:
    """vLLM's spec tells none of these; see ``test_namespace`` for all of them."""
    host = _host(core, weights=None)
    assert host.job([key(1)], [0], load=False).success
    host.tier.shutdown()
    change(core)
    other = _host(core, weights=None)
    assert other.lookup(key(1)) == [found]
    other.tier.shutdown()


def test_chunks_of_adapters_are_shared_with_nobody(core: Core) -> None:
    _with_adapters(core)
    for _ in range(2):
        host = _host(core)
        assert host.lookup(key(1)) == [LookupResult.MISS]
        assert host.job([key(1)], [0], load=False).success
        host.tier.shutdown()


def test_after_a_change_no_chunk_of_before_is_found_and_none_of_after_elsewhere(core: Core) -> None:
    host = _host(core)
    assert host.job([key(1)], [0], load=False).success
    engine_core._tell(core, engine_core.Change.RESET, "reset_prefix_cache")
    assert host.lookup(key(1)) == [LookupResult.MISS]
    assert not host.job([key(1)], [0], load=True).success
    assert host.job([key(1), key(2)], [1, 2], load=False).success
    assert host.lookup(key(1), key(2)) == [LookupResult.HIT] * 2
    engine_core._tell(core, engine_core.Change.WEIGHTS, "reload_weights")
    assert host.lookup(key(1), key(2)) == [LookupResult.MISS] * 2
    host.tier.shutdown()
    # The files' weights are those of the first chunk alone.
    again = _host(core)
    assert again.lookup(key(1), key(2)) == [LookupResult.HIT, LookupResult.MISS]
    again.tier.shutdown()


def test_a_store_that_waits_keeps_the_name_of_its_time(core: Core) -> None:
    host = _host(core, n_write_threads=1)
    busy = threading.Event()
    host.tier._writers.submit(busy.wait)
    host.tier.submit_store(TransferJob(1, [key(1)], np.arange(1), False, CONTEXT))
    host.tier.changed(engine_core.Change.RESET)
    busy.set()
    host.tier.drain_jobs()
    assert host.lookup(key(1)) == [LookupResult.MISS]
    host.tier.shutdown()
