"""Refusals of the connector's extra configuration, and their messages."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape

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
