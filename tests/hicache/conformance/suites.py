"""Which of vLLM's own tests run on our classes, and what is put in their place."""

from __future__ import annotations

from pathlib import Path

from vllm_graft.testing.upstream import Suite, Swap

STAND_INS = Path(__file__).with_name("graft_stand_ins.py")
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
        # Every scheduler that a test makes without naming a connector has ours.
        _unit('kv_connector: str = "NixlConnector"', 'kv_connector: str = "SeededConnector"'),
        _unit('kv_role: str = "kv_consumer"', 'kv_role: str = "kv_both"'),
        _unit("kv_connector_extra_config or {}", "kv_connector_extra_config or stand_ins.EXTRA"),
        # A mock of a connector passes calls on to ours.
        _unit("    connector = Mock()\n", "    connector = stand_ins.spy()\n"),
        # The connector that the wrapper TestExampleConnector records the calls of.
        _unit(
            "ExampleConnector(config, role, kv_cache_config)",
            "stand_ins.inside(config, role, kv_cache_config)",
        ),
        _unit("import tempfile\n", "import tempfile\nimport graft_stand_ins as stand_ins\n"),
        _unit(
            "vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (",
            "vllm_graft.hicache.metadata import (",
            file="test_kv_connector_lifecycle.py",
        ),
        _unit(
            "ExampleConnectorMetadata",
            "HiCacheMetadata",
            2,
            file="test_kv_connector_lifecycle.py",
        ),
        # A connector that supports the hybrid memory allocator: alone, and below MultiConnector.
        _unit('"SimpleCPUOffloadConnector"', '"HiCacheConnector"', 3, "test_hma_auto_config.py"),
        _unit('"cpu_bytes_to_use"', '"host_bytes"', 4, "test_hma_auto_config.py"),
        _unit(
            "import pytest\n",
            "import pytest\nimport graft_stand_ins\n",
            file="test_hma_auto_config.py",
        ),
        # A connector of a plugin, which the scheduler is made to give block hashes.
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
        # Children of MultiConnector.
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

SUITES: dict[str, tuple[Suite, int]] = {"connector": (CONNECTOR, 73)}
"""By name: the suite, and how many tests of it run."""

SKIPPED = {
    # Of vLLM's own making.
    "test_multi_connector::test_multi_connector_mixed_hma_disables_hybrid_kv_cache",
}
