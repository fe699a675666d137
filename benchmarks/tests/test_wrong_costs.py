from __future__ import annotations

import pytest

from benchmarks import wrong_costs


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
