"""Rows of arms: medians, the table with its comparison, and diagrams."""

import re

import pytest

from vllm_graft.bench.common.arm import Row, median_row, panels, table


def row(arm: str, part: str, name: str, value: float) -> Row:
    return Row(arm, {"part": part}, {name: value})


def test_medians_of_all_figures_and_the_first_one_of_each_round() -> None:
    rounds: list[dict[str, float | None]] = [
        {"ms": 3.0, "use": None},
        {"ms": 1.0, "use": 0.25},
        {"ms": 8.0, "use": 0.75},
    ]
    found = median_row("ours", {"px": 224}, rounds, nodes={3: 1})
    assert found.main == ("ms", 3.0)
    figures = {"ms": 3.0, "use": 0.5, "rounds": [3.0, 1.0, 8.0]}
    assert found.flat() == {"arm": "ours", "px": 224, **figures, "nodes": {3: 1}}
    assert median_row("ours", {}, rounds[:1]).figures == {"ms": 3.0, "use": None}


def test_of_times_the_shorter_one_is_better_and_of_rates_the_higher_one() -> None:
    times = {"none": 40.0, "native": 20.0, "ours": 10.0, 'ours:{"load": "async"}': 12.0}
    rows = [row(arm, "first", "first_token_ms", time) for arm, time in times.items()]
    rates = {"none": 2.0, "ours": 3.0}
    rows += [row(arm, "load", "turns_per_second", rate) for arm, rate in rates.items()]

    def cells(text: str) -> list[list[str]]:
        return [re.split(r"  +", line) for line in text.splitlines()]

    head, *lines = cells(table(rows, lambda row: f"{row.main[1]:g}"))
    assert head == ["part", "none", "native", "ours", 'ours:{"load": "async"}', "ours / best other"]
    assert lines[0] == ["first", "40", "20", "10", "12", "2.00"]
    assert lines[1] == ["load", "2", "-", "3", "-", "1.50"]
    assert cells(table(rows[:2], lambda row: "x"))[1] == ["first", "x", "x", "-"]
    assert table([], lambda row: "x") == ""
    # A short time ended before a turn did.
    for name in ("turns_per_second", "first_token_ms"):
        none = [row(arm, "load", name, 0.0) for arm in ("none", "ours")]
        assert cells(table(none, lambda row: "x"))[1] == ["load", "x", "x", "-"]


def test_a_diagram_for_each_figure_and_each_other_part_of_the_case() -> None:
    rows = [
        Row(arm, {"temperature": heat, "px": px}, {"ms": px / 10, "length": None})
        for arm in ("off", "ours")
        for heat in (0.0, 1.0)
        for px in (224, 448)
    ]
    found = panels(rows, "px", {"ms": "ms per call", "length": "length"})
    assert [(panel.title, panel.x, panel.y) for panel in found] == [
        ("temperature 0", "px", "ms per call"),
        ("temperature 1", "px", "ms per call"),
    ]
    assert found[0].series["ours"] == [(224, pytest.approx(22.4)), (448, pytest.approx(44.8))]
