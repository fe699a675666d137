"""The extra config: what is refused, and how it says so."""

from __future__ import annotations

import multiprocessing
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache import setup
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.host.pool import PAGE, SHM, HostPool, PoolShape

FLAG = "--kv-transfer-config.kv_connector_extra_config"


def test_sizes_and_defaults() -> None:
    config = HiCacheConfig.parse({"host_bytes": "64GiB"})
    assert config.host_bytes == 64 << 30
    assert (config.load, config.eviction, config.write_policy) == ("auto", "lru", "write_through")
    assert HiCacheConfig.parse({"host_bytes": 4096}).host_bytes == 4096
    assert config.staging_bytes == 48 << 20
    for given, found in (("96MiB", 96 << 20), (0, 0)):
        values = {"host_bytes": 1, "staging_bytes": given}
        assert HiCacheConfig.parse(values).staging_bytes == found


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, f"{FLAG}.host_bytes is missing"),
        ({"host_bytes": True}, f"{FLAG}.host_bytes: True is refused"),
        ({"host_bytes": 0}, "greater than 0"),
        ({"host_bytes": 1, "staging_bytes": -1}, f"{FLAG}.staging_bytes: -1 is refused"),
        ({"host_byts": 1, "host_bytes": 1}, "host_byts: unknown key. Did you mean 'host_bytes'?"),
        ({"host_bytes": 1, "load": "lazy"}, f"{FLAG}.load: 'lazy' is refused"),
        (
            {"host_bytes": 1, "prefetch": {"polcy": "timeout"}},
            f"{FLAG}.prefetch.polcy: unknown key. Did you mean 'policy'?",
        ),
        ({"host_bytes": 1, "storage": {"path": "/x"}}, f"{FLAG}.storage.backend is missing"),
    ],
)
def test_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HiCacheConfig.parse(values)
    assert words in str(caught.value)


def test_a_pool_too_small_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host_bytes is 4096, .* give at least 16384"):
        PoolShape.fit(4096, 8000, num_shards=2)
    shape = PoolShape.fit(10 * PAGE, PAGE + 1, num_shards=2)
    assert (shape.num_slots, shape.slot_bytes) == (2, 2 * PAGE)


def test_processes_share_one_region() -> None:
    shape = PoolShape(num_slots=3, slot_bytes=PAGE, num_shards=2)
    name = "vllm_graft_test_region"
    one = HostPool(shape, name)
    other = HostPool(shape, name)
    one.unlink()
    one.page(1, 2, 5)[:] = b"hello"
    assert bytes(other.page(1, 2, 5)) == b"hello"
    assert not bytes(other.page(0, 2, 5)).strip(b"\0")
    one.close()
    assert bytes(other.page(1, 2, 5)) == b"hello"
    other.close()
    other.close()


def test_a_start_that_fails_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the scheduler's side cannot be made, nor where a rank ends before that."""
    name = f"vllm_graft_test_{os.getpid()}"
    shape = PoolShape(num_slots=3, slot_bytes=PAGE, num_shards=1)
    rank = HostPool(shape, name)
    assert (SHM / name).exists()

    def refuse(*_: object) -> object:
        raise ConfigError("storage.path cannot be used")

    monkeypatch.setattr(setup, "_make_scheduler", refuse)
    geometry = SimpleNamespace(shared_name=name)
    with pytest.raises(ConfigError, match="cannot be used"):
        setup.make_scheduler(None, geometry, None, None)  # type: ignore[arg-type]
    assert not (SHM / name).exists()
    rank.close()

    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_fail_after_mapping, args=(name,))
    child.start()
    child.join(60)
    assert child.exitcode == 1
    assert not (SHM / name).exists()


def _fail_after_mapping(name: str) -> None:
    pool = HostPool(PoolShape(num_slots=3, slot_bytes=PAGE, num_shards=1), name)
    sys.exit(0 if pool.address == 0 or not (SHM / name).exists() else 1)
