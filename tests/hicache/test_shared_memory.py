"""Real engines that share host memory: one's pages are the other's hits, whatever becomes of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.cache_engines import prompts, transfer
from tests.support.host_cache.sharing_engines import SharingEngine
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.hicache.host.region import SHM
from vllm_graft.hicache.pages.geometry import pool_prefix
from vllm_graft.testing.engine import default_options

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("tests_importable"),
]

PROMPTS = prompts(11, 200, 100, 65, 33)
HITS, NONE = [192, 96, 64, 32], [0, 0, 0, 0]
LATER = prompts(12, 150, 90)


def _config(llama: Path, **extra: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = transfer(load="async", shared=True, **extra)
    options: Any = {**default_options(), "kv_transfer_config": given}
    return EngineArgs(str(llama), **options).create_engine_config()


@pytest.fixture
def engines(llama: Path) -> Iterator[list[SharingEngine]]:
    found: list[SharingEngine] = []
    yield found
    for engine in found:
        engine.process.kill()
        engine.process.join()


def test_the_second_finds_what_the_first_wrote_and_outlives_it(
    llama: Path, engines: list[SharingEngine]
) -> None:
    config = _config(llama)
    extra = config.kv_transfer_config.kv_connector_extra_config
    regions = f"{pool_prefix(HiCacheConfig.parse(extra), config)}*"
    assert not list(SHM.glob(regions))
    first = SharingEngine(llama)
    engines.append(first)
    expected, cached, _ = first.ask(PROMPTS)
    assert cached == NONE
    second = SharingEngine(llama)
    engines.append(second)
    tokens, cached, counted = second.ask(PROMPTS)
    assert (tokens, cached) == (expected, HITS)
    assert counted["sharing_engines"] == 2
    pages = counted["hit_pages_of_others"]
    assert pages == sum(HITS) / 32
    assert len(list(SHM.glob(regions))) == 1
    with pytest.raises(ConfigError, match=r"is 67108864, but servers .* have 33554432"):
        _config(llama, host_bytes="64MiB")

    # What the second writes is the first's as well.
    later, cached, _ = second.ask(LATER)
    assert cached == [0, 0]
    assert first.ask(LATER)[:2] == (later, [128, 64])

    first.process.kill()
    first.process.join()
    tokens, cached, counted = second.ask(PROMPTS)
    assert (tokens, cached) == (expected, HITS)
    assert second.ask(LATER)[:2] == (later, [128, 64])
    assert second.ask("reset") == "reset"
    assert second.ask(PROMPTS)[:2] == (expected, NONE)
    tokens, cached, counted = second.ask(PROMPTS)
    assert (tokens, cached) == (expected, HITS)
    assert counted["sharing_engines"] == 1
    assert counted["hit_pages_of_others"] > pages
    second.stop()
    assert not list(SHM.glob(regions))
