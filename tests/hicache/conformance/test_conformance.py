"""vLLM's own tests of KV connectors and tiers, on ours.

The files come from vLLM's source distribution, with pip; none of them is in this repository. They
are kept in the user's cache folder. The suites below have the replacements in them.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from tests.support.engines import upstream
from tests.support.engines.upstream import Suite, Swap

STAND_INS = Path(__file__).with_name("graft_stand_ins.py")
CHILDREN = Path(__file__).with_name("graft_children.py")
NO_BOUNDARIES = "recurrent states without block boundaries: ours refuses to start on them"
UNIT = "tests/v1/kv_connector/unit"


def _unit(old: str, new: str, count: int = 1, file: str = "utils.py") -> Swap:
    return Swap(f"{UNIT}/{file}", old, new, count)


CONNECTOR = Suite(
    files=[
        f"{UNIT}/{name}.py"
        for name in (
            "test_kv_load_failure_recovery",
            "test_invalid_blocks_correctness",
            "test_error_propagation",
            "test_cache_pollution_prevention",
            "test_kv_connector_lifecycle",
            "test_remote_prefill_lifecycle",
            "test_multi_connector",
            "test_scheduler_kv_connector_override",
            "test_hma_auto_config",
            "test_output_aggregator",
        )
    ],
    swaps=[
        # Every scheduler for which a test names no connector has ours.
        _unit('kv_connector: str = "NixlConnector"', 'kv_connector: str = "SeededConnector"'),
        _unit('kv_role: str = "kv_consumer"', 'kv_role: str = "kv_both"'),
        _unit("kv_connector_extra_config or {}", "kv_connector_extra_config or stand_ins.EXTRA"),
        # A mock of a connector passes calls on to ours.
        _unit("    connector = Mock()\n", "    connector = stand_ins.spy()\n"),
        # The wrapper TestExampleConnector records the calls of this connector.
        _unit(
            "ExampleConnector(config, role, kv_cache_config)",
            "stand_ins.inside(config, role, kv_cache_config)",
        ),
        _unit("import tempfile\n", "import tempfile\nimport graft_stand_ins as stand_ins\n"),
        _unit(
            "vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (",
            "vllm_graft.hicache.messages.step_metadata import (",
            file="test_kv_connector_lifecycle.py",
        ),
        _unit(
            "ExampleConnectorMetadata", "HiCacheMetadata", 2, file="test_kv_connector_lifecycle.py"
        ),
        # This connector supports the hybrid memory allocator: alone, and below MultiConnector.
        _unit('"SimpleCPUOffloadConnector"', '"HiCacheConnector"', 3, "test_hma_auto_config.py"),
        _unit('"cpu_bytes_to_use"', '"host_bytes"', 4, "test_hma_auto_config.py"),
        _unit(
            "import pytest\n",
            "import pytest\nimport graft_stand_ins\n",
            file="test_hma_auto_config.py",
        ),
        # This is a plugin's connector, to which the scheduler is made to give block hashes.
        _unit(
            "class DummyKVConnector(KVConnectorBase_V1)",
            "class DummyKVConnector(HiCacheConnector)",
            file="test_scheduler_kv_connector_override.py",
        ),
        _unit(
            "import vllm.plugins as plugins_module\n",
            "import vllm.plugins as plugins_module\n"
            "from vllm_graft.hicache.connector import HiCacheConnector\n",
            file="test_scheduler_kv_connector_override.py",
        ),
        Swap(
            "tests/v1/core/utils.py",
            "            kv_connector=use_kv_connector,\n            kv_role=kv_role,\n",
            "            kv_connector=use_kv_connector,\n            kv_role=kv_role,\n"
            '            kv_connector_extra_config={"host_bytes": 64 << 20},\n',
        ),
        # These are children of MultiConnector.
        _unit(
            "class MockHMAConnector(KVConnectorBase_V1, SupportsHMA)",
            "class MockHMAConnector(HiCacheConnector)",
            file="test_multi_connector.py",
        ),
        *(
            _unit(
                f"{before}(spec_set=KVConnectorBase_V1)",
                f"{before}(spec_set=HiCacheConnector)",
                count,
                "test_multi_connector.py",
            )
            for before, count in (
                ("first = MagicMock", 1),
                ("second = MagicMock", 1),
                ("provider = MagicMock", 1),
                ("        MagicMock", 2),
            )
        ),
        _unit(
            "from vllm import LLM, SamplingParams\n",
            "from vllm import LLM, SamplingParams\n"
            "from vllm_graft.hicache.connector import HiCacheConnector\n",
            file="test_multi_connector.py",
        ),
    ],
    deselected={
        "test_p_side_chunked_prefill_mamba": NO_BOUNDARIES,
        "test_async_load_does_not_double_reserve_mamba_spec_blocks[none-128-18]": NO_BOUNDARIES,
        "test_multi_example_connector_consistency": "downloads a model and runs it on a GPU",
    },
    modules=[STAND_INS],
)

EVERYTHING = dataclasses.replace(
    CONNECTOR, files=[*CONNECTOR.files, CHILDREN.name], modules=[STAND_INS, CHILDREN]
)

PASSED = 73 + 5
"""Number of vLLM's tests that run, and of ours; fixed, as vLLM's version is pinned."""

SKIPPED = {
    # vLLM itself skips this test.
    "test_multi_connector::test_multi_connector_mixed_hma_disables_hybrid_kv_cache"
}


@pytest.fixture(scope="session")
def source() -> Path:
    try:
        return upstream.fetch()
    except upstream.NoNetworkError as error:
        if os.environ.get("GRAFT_NEEDS_UPSTREAM"):
            raise
        pytest.skip(f"NOT RUN: vLLM's own tests are not in the cache, and {error}")


@pytest.mark.slow
def test_vllms_tests_pass_with_ours(source: Path, tmp_path: Path) -> None:
    outcome = upstream.run(EVERYTHING, source, tmp_path)
    assert not outcome.failed, outcome.output[-20_000:]
    assert set(outcome.skipped) <= SKIPPED, outcome.skipped
    # Fewer would mean that files got lost, more that a replacement has no test any more.
    assert len(outcome.passed) == PASSED
    assert all(len(why) > 20 for why in EVERYTHING.deselected.values())


@pytest.mark.nightly
def test_a_broken_connector_fails_them(source: Path, tmp_path: Path) -> None:
    broken = upstream.Swap(f"{UNIT}/utils.py", '"SeededConnector"', '"BrokenConnector"', 1)
    file = f"{UNIT}/test_remote_prefill_lifecycle.py"
    suite = dataclasses.replace(
        CONNECTOR,
        files=[file],
        swaps=[*CONNECTOR.swaps, broken],
        deselected={"test_p_side_chunked_prefill_mamba": NO_BOUNDARIES},
    )
    outcome = upstream.run(suite, source, tmp_path)
    assert "test_remote_prefill_lifecycle::test_basic_lifecycle" in outcome.failed
    assert outcome.passed


def test_replacements_have_to_fit(source: Path, tmp_path: Path) -> None:
    swap = upstream.Swap(f"{UNIT}/utils.py", "class NotThere", "", 1)
    with pytest.raises(upstream.UpstreamError, match="'class NotThere' 0 times, not 1"):
        upstream.run(upstream.Suite(["tests"], [swap]), source, tmp_path)
