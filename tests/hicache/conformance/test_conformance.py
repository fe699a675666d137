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

OFFLOAD = "tests/v1/kv_offload"

TIERING = f"{OFFLOAD}/tiering/test_tiering_offloading.py"
FS = f"{OFFLOAD}/tiering/test_fs_tier.py"

TIER = Suite(
    files=[FS, TIERING, f"{OFFLOAD}/tiering/test_metrics.py", f"{OFFLOAD}/tiering/test_factory.py"],
    swaps=[
        Swap(
            TIERING,
            "from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager\n",
            "from graft_stand_ins import ExampleTier as ExampleSecondaryTierManager\n",
        ),
        Swap(
            FS,
            "from vllm.v1.kv_offload.tiering.fs.manager import (\n    FileSystemTierManager,\n)\n",
            "from vllm_graft.base.errors import GraftError\n"
            "from graft_stand_ins import FsTier as FileSystemTierManager\n",
        ),
        Swap(FS, '"type": "fs"', '"type": "FsTier", "module_path": "graft_stand_ins"'),
        # Both errors say what is wrong with the path.
        Swap(FS, "pytest.raises(OSError)", "pytest.raises(GraftError)"),
        # A record of ours stands for a chunk's file.
        Swap(FS, "os.path.exists(dest)", "dest.exists()"),
        Swap(FS, "os.path.exists(path)", "path.exists()", 2),
        Swap(
            FS,
            "os.path.exists(tier.file_mapper.get_file_name(k))",
            "tier.file_mapper.get_file_name(k).exists()",
            2,
        ),
        Swap(FS, 'open(path, "wb")', "path.spoiled()"),
        Swap(FS, 'open(bad_path, "wb")', "bad_path.spoiled()"),
        Swap(
            FS,
            'open(tier.file_mapper.get_file_name(key(1)), "wb")',
            "tier.file_mapper.get_file_name(key(1)).spoiled()",
        ),
        Swap(
            FS,
            'monkeypatch.setattr(mgr_mod, "batch_store_block", flaky_batch_store_block)',
            "failing_path.refuse_writes(monkeypatch)",
            2,
        ),
    ],
    deselected={
        "test_batched_load_first_block_fails_marks_whole_batch": "vLLM's tier stops at the first "
        "chunk that fails; ours loads the others, and says which: any subset is allowed",
        "test_transient_load_failure_leaves_file": "puts a link in the place of a chunk's file, "
        "and ours has many chunks in one; errors of the medium are in test_storage_failing.py",
    },
    modules=[STAND_INS],
)

PARTS = {"connector": CONNECTOR, "tier": TIER}

EVERYTHING = Suite(
    files=[*(file for part in PARTS.values() for file in part.files), CHILDREN.name],
    swaps=[swap for part in PARTS.values() for swap in part.swaps],
    deselected={name: why for part in PARTS.values() for name, why in part.deselected.items()},
    modules=[STAND_INS, CHILDREN],
)
"""Run every part in one process, because imports take most of its time."""

PASSED = 73 + 121 + 5
"""Number of tests that run in the two parts and ours; fixed, as vLLM's version is pinned."""

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
