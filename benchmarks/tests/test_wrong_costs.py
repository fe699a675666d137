"""What wrong costs lose, as the table says."""

from __future__ import annotations

import pytest

from benchmarks import wrong_costs
from tests.support.wrong_costs import FAR, FAR_LENGTHS, far, shares


def test_a_table_has_the_cases_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    wrong_costs.main(
        ["--steps", "60", "400", "--seeds", "2", "--only", "Qwen3.5, 16 requests, as measured"]
    )
    *_, row = capsys.readouterr().out.splitlines()
    name, begin, after = (each.strip() for each in row.strip("|").split("|")[:3])
    assert name == "Qwen3.5, 16 requests, as measured"
    median, worst = map(float, after.split(" / "))
    # The first steps have the number that the wrong costs ask for.
    assert float(begin.split(" / ")[0]) < worst <= median <= 1.0


def test_a_row_has_the_median_and_the_worst_seed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong_costs.main(["--steps", "100", "300", "--seeds", "3", "--only", "33k"])
    _, _, row = capsys.readouterr().out.splitlines()
    expected = [shares(far(), (100, 300), seed) for seed in range(3)]
    cells = [f"{sorted(each)[1]:.3f} / {min(each):.3f}" for each in zip(*expected)]
    assert [cell.strip() for cell in row.split("|")[2:4]] == cells


def test_long_contexts_make_many_nodes_worse_than_they_seem() -> None:
    """63 nodes would be the best if the contexts took the same time with any number of nodes."""
    told = far().told
    assert max(FAR, key=lambda nodes: FAR_LENGTHS[nodes] / (told[nodes] + 6.0)) == 63
    assert max(FAR, key=lambda nodes: FAR_LENGTHS[nodes] / FAR[nodes]) == 15
