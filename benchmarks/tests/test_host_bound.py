from __future__ import annotations

import pytest

from benchmarks import host_bound


def test_a_table_has_both_tuners(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_bound, "TEXTS", ("0",))
    host_bound.main(["--part", "0.25", "--host", "4.5", "--batch", "16"])
    *_, row = capsys.readouterr().out.splitlines()
    part, host, cell = (each.strip() for each in row.strip("|").split("|")[:3])
    assert (part, host) == ("0.25", "4.5")
    alike, floors = map(float, cell.split(" / "))
    assert 0.5 < alike < floors - 0.05
    assert floors <= 1.05
