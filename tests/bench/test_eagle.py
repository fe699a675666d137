"""The benchmark's own arithmetic; what it measures is measured on a GPU, by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vllm_graft.bench import eagle


class Arm:
    """Answers as an arm's process does, with prepared rates."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)
        self.cases: list[eagle.Case] = []

    def send(self, case: eagle.Case) -> None:
        self.cases.append(case)

    def recv(self) -> eagle.Measured:
        return eagle.Measured(self.rates[len(self.cases) - 1], 2.5)


def test_medians_leave_the_warm_up_out() -> None:
    arms = {"none": Arm(9999, 10, 30, 20), "tree:31": Arm(1, 50, 40, 45)}
    arguments = argparse.Namespace(requests=10, tokens=64, rounds=3)
    rows = eagle.take_turns(arms, arguments, temperature=1.0, batch=4)  # type: ignore[arg-type]
    assert [(row.arm, row.tokens_per_second) for row in rows] == [("none", 20), ("tree:31", 45)]
    assert rows[0].rounds == [10, 30, 20]
    # Whole batches only, and never none.
    assert arms["none"].cases[1] == eagle.Case(1.0, 4, 8, 64)


def test_arms() -> None:
    options = eagle.engine_options("tree:31@[[1,2,31],[3,9,7]]", Path("pair"), topk=8, steps=6)
    speculative = options["speculative_config"]
    assert speculative["num_speculative_tokens"] == 31
    assert speculative["num_speculative_tokens_per_batch_size"] == [[1, 2, 31], [3, 9, 7]]
    assert options["additional_config"] == {"graft": {"eagle": {"topk": 8, "steps": 6}}}
    assert "additional_config" not in eagle.engine_options("chain:5", Path("pair"), 8, 6)
    assert eagle.engine_options("none", Path("pair"), 8, 6) == {}
    with pytest.raises(SystemExit, match="'forest:3'"):
        eagle.engine_options("forest:3", Path("pair"), 8, 6)


def test_table() -> None:
    rows = [eagle.Row("none", 0.0, 1, 200.4, 1.0, []), eagle.Row("chain:5", 0.0, 1, 550.0, 3.8, [])]
    assert eagle.table(rows).splitlines() == [
        "| temperature | batch | none | chain:5 |",
        "|---|---|---|---|",
        "| 0 | 1 | 200 (1.00) | 550 (3.80) |",
    ]


def test_panels() -> None:
    rows = [
        eagle.Row(arm, temperature, batch, 100.0 * batch, 2.0, [])
        for arm in ("none", "tree:31")
        for temperature in (0.0, 1.0)
        for batch in (1, 4)
    ]
    rates, lengths, *rest = eagle.panels(rows)
    assert rates.series == {"none": [(1, 100), (4, 400)], "tree:31": [(1, 100), (4, 400)]}
    assert lengths.series["tree:31"] == [(1, 2.0), (4, 2.0)]
    assert [panel.title for panel in rest] == ["temperature 1"] * 2
