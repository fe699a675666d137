from __future__ import annotations

import pytest

from benchmarks import expert_costs


def test_a_table_has_both_tuners(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(expert_costs, "TOLD", ((0.06, 31),))
    expert_costs.main(["--steps", "150", "--batch", "1"])
    *_, row = capsys.readouterr().out.splitlines()
    name, steps, cell = (each.strip() for each in row.strip("|").split("|")[:3])
    assert (name, steps) == ("0.06, 31 nodes", "150")
    trusted, corrected = map(float, cell.split(" / "))
    assert 0.5 < trusted < corrected <= 1.05
