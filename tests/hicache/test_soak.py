"""Whole engines under injected faults and ``kill -9``; ``soak.py`` does the same for hours.

``GRAFT_SOAK_FAULTS`` and ``GRAFT_SOAK_KILLS`` raise the counts.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.hicache.soak import expected_tokens, fault_run, prompts
from tests.support.processes import finished

ROOT = Path(__file__).parents[2]
FAULTS = int(os.environ.get("GRAFT_SOAK_FAULTS", "60"))
KILLS = int(os.environ.get("GRAFT_SOAK_KILLS", "1"))

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600 + FAULTS + 60 * KILLS)]


def soak(*arguments: str) -> list[dict[str, int]]:
    """Run ``soak.py`` in a process that may fork; return the lines of counts."""
    command = (sys.executable, "-m", "tests.hicache.soak", *arguments)
    said = finished(*command, cwd=ROOT, timeout=None)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_faults_change_no_token(llama: Path, tmp_path: Path) -> None:
    expected = expected_tokens(llama, prompts())
    counts = fault_run(llama, expected, tmp_path, FAULTS, seed=1, load="auto")
    assert counts["injected"] >= FAULTS
    # "blind" counts controls in which spoilt pages, past the checksums, changed no token.
    assert {"wrong", "errors", "hung", "blind"}.isdisjoint(counts)
    # Faults did happen: copies and storage both failed, and pages were still used.
    for site in ("copy_failing", "pwrite_corrupt", "pwrite_failing", "cached_tokens", "requests"):
        assert counts[site] > 0, counts


@pytest.mark.nightly
def test_killed_engines_leave_no_wrong_page() -> None:
    counts = soak("kills", "--count", str(KILLS))[-1]
    assert counts["kills"] == KILLS
    assert {"wrong", "later_wrong", "errors", "hung", "died"}.isdisjoint(counts)
    assert counts["requests"] >= KILLS
