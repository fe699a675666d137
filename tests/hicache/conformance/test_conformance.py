"""vLLM's own tests of KV connectors and tiers, on ours.

The files come from vLLM's source distribution, with pip; none of them is in this repository. They
are kept in the user's cache folder. ``suites.py`` has the replacements in them.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import suites

from tests.support.engines import upstream


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
    outcome = upstream.run(suites.EVERYTHING, source, tmp_path)
    assert not outcome.failed, outcome.output[-20_000:]
    assert set(outcome.skipped) <= suites.SKIPPED, outcome.skipped
    # Fewer would mean that files got lost, more that a replacement has no test any more.
    assert len(outcome.passed) == suites.PASSED
    assert all(len(why) > 20 for why in suites.EVERYTHING.deselected.values())


@pytest.mark.nightly
def test_a_broken_connector_fails_them(source: Path, tmp_path: Path) -> None:
    broken = upstream.Swap(f"{suites.UNIT}/utils.py", '"SeededConnector"', '"BrokenConnector"', 1)
    file = f"{suites.UNIT}/test_remote_prefill_lifecycle.py"
    suite = dataclasses.replace(
        suites.CONNECTOR,
        files=[file],
        swaps=[*suites.CONNECTOR.swaps, broken],
        deselected={"test_p_side_chunked_prefill_mamba": suites.NO_BOUNDARIES},
    )
    outcome = upstream.run(suite, source, tmp_path)
    assert "test_remote_prefill_lifecycle::test_basic_lifecycle" in outcome.failed
    assert outcome.passed


def test_replacements_have_to_fit(source: Path, tmp_path: Path) -> None:
    swap = upstream.Swap(f"{suites.UNIT}/utils.py", "class NotThere", "", 1)
    with pytest.raises(upstream.UpstreamError, match="'class NotThere' 0 times, not 1"):
        upstream.run(upstream.Suite(["tests"], [swap]), source, tmp_path)
