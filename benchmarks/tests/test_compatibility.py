"""The table of versions says what the logs of the runs said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import compatibility
from benchmarks.compatibility import LogError, Run, results, table

LOG = """
tests/hicache/test_a.py::test_copies[1 MiB] PASSED [ 1%]
tests/hicache/test_a.py::test_b FAILED       [ 2%]
tests/spec_decode/drafters/test_chain_gpu.py::test_c PASSED [ 3%]
tests/spec_decode/heads/test_d.py::test_d PASSED [ 4%]
tests/spec_decode/heads/test_d.py::test_d ERROR [ 4%]
tests/plugin/test_e.py::test_e SKIPPED (no device) [ 5%]
"""


def add(file: Path, log: str, *flags: str, commit: str = "c1") -> Run:
    path = file.parent / "log"
    path.write_text(log)
    told = ["--commit", commit, "--vllm", "0.33.0", "--torch", "2.11.0", "--python", "3.12.3"]
    given = ["add", str(path), *told, "--device", "H200", "--date", "2026-11-24", *flags]
    return compatibility.add(compatibility.parsed(given), file)


def test_a_log_is_counted_by_part(tmp_path: Path) -> None:
    run = add(tmp_path / "runs.json", LOG)
    assert run.passed == {"draft graphs": 1, "host cache": 1}
    assert run.failed == [
        "tests/hicache/test_a.py::test_b",
        "tests/spec_decode/heads/test_d.py::test_d",
    ]


def test_a_failure_stands_until_the_test_passes(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    add(file, LOG)
    row = table(compatibility.read_runs(file)).splitlines()[-1]
    assert "| 1 failed | " not in row, "no part without its number of passed tests"
    assert "| 0 passed, 1 failed | 1 passed | - | 1 passed, 1 failed | - | c1, 2026" in row
    again = "tests/hicache/test_a.py::test_b PASSED\ntests/hicache/test_a.py::test_f PASSED\n"
    assert add(file, again, "--some", commit="c2").mended == ["tests/hicache/test_a.py::test_b"]
    row = table(compatibility.read_runs(file)).splitlines()[-1]
    assert "| 0 passed, 1 failed | 1 passed | - | 2 passed | - | c2, 2026" in row
    # A whole run replaces all earlier runs.
    add(file, "tests/hicache/test_a.py::test_b FAILED\n", commit="c3")
    row = table(compatibility.read_runs(file)).splitlines()[-1]
    assert "| - | - | - | 0 passed, 1 failed | - | c3, 2026" in row


def test_a_log_without_results_is_refused() -> None:
    with pytest.raises(LogError, match="run pytest with -v"):
        results("308 passed in 379.98s")


def test_the_page_has_the_table_of_the_runs_on_record() -> None:
    page = (Path(__file__).parents[2] / "docs" / "versions.md").read_text()
    _, _, rest = page.partition("<!-- compatibility:begin -->\n")
    shown, _, _ = rest.partition("\n<!-- compatibility:end -->")
    assert shown == table(compatibility.read_runs())
