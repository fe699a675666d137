"""The race: who takes part, which columns stay, what is compared, and a run on a tiny pair."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab_heads import __main__ as program
from benchmarks.lab_heads import accepting, racing
from benchmarks.lab_heads.racing import Cell, Race
from tests.support.shipped_pair import SHIPPED
from vllm_graft.bench.common.closed_loop import Ask, Call, Case, Measured, hold_nodes
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.timing import Deadline


class Pipe:
    """An engine that has a rate for each number of drafts."""

    def __init__(self, rates: dict[int | None, float], heard: list[Any]) -> None:
        self.rates, self.heard = rates, heard

    def send(self, wish: Any) -> None:
        self.heard.append(wish)

    def recv(self) -> Measured | None:
        last = self.heard[-1]
        return Measured(self.rates[last.drafts], 1.5) if isinstance(last, Case) else None


def race_of(cells: list[Cell], file: Path | None = None) -> tuple[Race, list[Any]]:
    heard: list[Any] = []
    chain: Any = Pipe({1: 100.0, 2: 120.0, 3: 80.0}, heard)
    ours: Any = Pipe({None: 138.0}, heard)
    columns: racing.Columns = {f"block:{k}": (chain, k) for k in (1, 2, 3)}
    columns["auto:31"] = (ours, None)
    found = Race(
        columns,
        cells,
        keep=0.9,
        tokens=64,
        file=str(file) if file else None,
        settings={"kind": "mtp"},
    )
    return found, heard


def test_columns_take_turns_and_slow_lengths_are_left_out(tmp_path: Path) -> None:
    cells = [Cell(0.0, 1), Cell(1.0, 1), Cell(1.0, 4)]
    race, heard = race_of(cells, tmp_path / "race.json")
    race.run(2, Deadline(None))
    # Each kind of batch is warmed up on all columns, on chains of each length.
    warmed = [each for each in heard if isinstance(each, Ask)]
    assert [each.case.max_tokens for each in warmed] == [racing.WARM_UP_TOKENS] * 12
    told = [each.arguments[0] for each in heard if isinstance(each, Call)]
    assert told == [1, 2, 3] * 3
    cases = [each for each in heard if isinstance(each, Case)]
    turns = [(case.temperature, case.batch, case.drafts) for case in cases]
    assert turns[:4] == [(0.0, 1, 1), (0.0, 1, 2), (0.0, 1, 3), (0.0, 1, None)]
    # The second round is the other way round, without chains of 1 and 3.
    assert turns[12:] == [
        (0.0, 1, None), (0.0, 1, 2), (1.0, 1, None), (1.0, 1, 2), (1.0, 4, None), (1.0, 4, 2),
    ]  # fmt: skip
    firsts = [case.first for case in cases]
    assert firsts[0] == firsts[3] == 0 != firsts[12] == firsts[13]
    assert cells[0].best() == "block:2"
    assert cells[0].ratios() == [1.15, 1.15]
    assert [each is None for each in cells[0].found["block:3"]] == [False, True]
    written = json.loads((tmp_path / "race.json").read_text())
    assert written["settings"] == {"kind": "mtp"}
    assert written["cells"][2]["found"]["auto:31"][1]["rate"] == 138.0
    assert written["table"] == racing.table(cells)


def test_the_table_says_which_bars_are_met() -> None:
    cells = [Cell(0.0, 64), Cell(0.0, 1), Cell(0.6, 2), Cell(1.0, 16)]
    race, _ = race_of(cells)
    race.run(1, Deadline(None))
    cells.append(Cell(0.6, 4))
    rows = [line.split(" | ") for line in racing.table(cells).splitlines()[2:]]
    assert [row[0].strip("| ") for row in rows] == ["1", "2", "16", "64"]
    assert [row[-1].strip("| ") for row in rows] == ["yes", "-", "yes", "yes"]
    assert rows[0][3:6] == ["block:2 120 (1.50)", "auto:31 138 (1.50)", "1.150"]
    # Control: a slower engine of ours meets no bar.
    for cell in cells[:4]:
        cell.found["auto:31"] = [Measured(100.0, 1.5)]
    rows = [line.split(" | ") for line in racing.table(cells).splitlines()[2:]]
    assert [row[-1].strip("| ") for row in rows] == ["no", "-", "no", "no"]


def test_each_round_is_compared_with_its_own_fastest_chain() -> None:
    """A chain that sat out a round of hard prompts must not be the one to compare with."""
    cell = Cell(0.0, 1)
    rates: dict[str, list[float | None]] = {
        "block:2": [318.0, None], "block:3": [354.0, 273.0], "auto:31": [491.0, 411.0],
    }  # fmt: skip
    cell.found = {
        name: [None if rate is None else Measured(rate, 1.5) for rate in each]
        for name, each in rates.items()
    }
    assert cell.best() == "block:2"
    assert cell.ratios() == [491 / 354, 411 / 273]


def test_several_engines_of_ours_are_each_compared_with_stock() -> None:
    cell = Cell(0.0, 16)
    rates = {"block:3": 100.0, "auto:63": 110.0, "auto:63+whole": 90.0}
    cell.found = {name: [Measured(rate, 1.5)] for name, rate in rates.items()}
    assert [cell.ratios(name) for name in cell.ours()] == [[1.1], [0.9]]
    assert cell.ratios() == [1.1]
    rows = racing.table([cell]).splitlines()[-2:]
    assert [("1.100" in row, "0.900" in row) for row in rows] == [(True, False), (False, True)]


def test_what_does_not_fit_into_the_time_is_left_out() -> None:
    cells = [Cell(0.0, 1, took=50.0), Cell(0.0, 4)]
    race, _ = race_of(cells)
    race.run(3, Deadline(10.0))
    assert not cells[0].found
    assert len(cells[1].found["auto:31"]) == 3


def test_rounds_that_a_cell_missed_count_for_nobody() -> None:
    cell = Cell(0.0, 1)
    race, _ = race_of([cell])
    for number in (0, 2):
        race._measure(cell, number)
    assert [len(found) for found in cell.found.values()] == [3] * 4
    assert cell.found["auto:31"][1] is None
    assert len(cell.ratios()) == 2


def arms(*given: str) -> list[str]:
    arguments = program.parser().parse_args(["race", "pair", *given])
    return [arm.name for arm in racing.arms_of(arguments)]


def test_arms_of_each_kind() -> None:
    assert arms("mtp") == ["block:1,2,3", "auto:63+fp8head"]
    assert arms("dspark", "--ours", "") == ["block:7", "auto:63"]
    assert arms("dspark", "--ours", "+fp8head", "+fp8head+whole") == [
        "block:7", "auto:63+fp8head", "auto:63+fp8head+whole",
    ]  # fmt: skip
    # A block of vLLM's has the length that the engine was started with.
    assert arms("dspark", "--lengths", "3", "7", "--fp8-draft") == [
        "block:3+fp8", "block:7+fp8", "auto:63+fp8",
    ]  # fmt: skip
    parsed: argparse.Namespace = program.parser().parse_args(["race", "pair", "dspark"])
    [chain, ours] = racing.arms_of(parsed)
    assert chain.options["speculative_config"]["method"] == "dspark"
    assert ours.options["additional_config"]["graft"]["tree"]["steps"] == 7


def test_our_engines_by_the_names_of_arms() -> None:
    assert arms("dspark", "--ours", "tree:7+fp8head", "+fp8head") == [
        "block:7", "tree:7+fp8head", "auto:63+fp8head",
    ]  # fmt: skip
    with pytest.raises(BenchmarkError, match="--arms 'trees:7': say none, chain"):
        arms("dspark", "--ours", "trees:7")


def test_fixed_numbers_of_nodes_are_columns_of_the_engine_that_chooses() -> None:
    def columns(*given: str) -> tuple[racing.Columns, dict[str, int | None]]:
        arguments = program.parser().parse_args(["race", "pair", "dspark", *given])
        return racing.fixed_columns(arguments, {"block:7": (0, 7), "auto:63+fp8head": (1, None)})

    assert columns() == ({"block:7": (0, 7), "auto:63+fp8head": (1, None)}, {})
    found, held = columns("--fixed", "3", "14")
    assert list(found) == ["block:7", "auto:63+fp8head", "auto:63+fp8head@3", "auto:63+fp8head@14"]
    assert found["auto:63+fp8head@3"] == (1, None)
    assert held == {"auto:63+fp8head": None, "auto:63+fp8head@3": 3, "auto:63+fp8head@14": 14}
    with pytest.raises(BenchmarkError, match=r"--fixed \[5\]: auto:63\+fp8head chooses among .*14"):
        columns("--fixed", "5")


def test_an_engine_keeps_the_nodes_of_each_column() -> None:
    heard: list[Any] = []
    pipe = Pipe({None: 100.0}, heard)
    names = ["auto:63", "auto:63@3", "auto:63@7"]
    held = dict(zip(names, (None, 3, 7)))
    columns: racing.Columns = dict.fromkeys(names, (pipe, None))
    race = Race(columns, [Cell(1.0, 4)], keep=0.9, tokens=8, file=None, settings={}, held=held)
    race.run(2, Deadline(None))
    assert all(each.function is hold_nodes for each in heard if isinstance(each, Call))
    told = [each.arguments[0] for each in heard if isinstance(each, Call)]
    assert told == [None, 3, 7] * 2 + [7, 3, None]
    # Each is said just before what it is for.
    assert all(isinstance(each, Ask | Case) for each in heard[1::2])
    assert isinstance(heard[0], Call)


def test_engines_of_accept() -> None:
    assert accepting.read_engine("random chain:3") == {"chain": 3}
    assert accepting.read_engine("tree:15x4") == {"nodes": 15, "steps": 4, "topk": 8}
    for name in ("tree:15", "chain:x", "auto:3"):
        with pytest.raises(BenchmarkError, match=f"--arms '{name}'"):
            accepting.read_engine(name)


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_race_runs_through(tmp_path: Path) -> None:
    """Engines of a target with a module that is trained for a moment: figures mean nothing."""
    call = [sys.executable, "-m", "benchmarks.lab_heads"]
    small = ["--steps", "3", "--tokens", "600", "--longest", "60", "--written", "40"]
    root = SHIPPED.parents[1]

    def run(*given: str) -> str:
        done = subprocess.run([*call, *given], cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    few = ["--answers", "6", "--held-out", "4", "--max-tokens", "12", "--rows", "4"]
    run("answers", str(SHIPPED), str(tmp_path), *few)
    out = run("train", str(SHIPPED), str(tmp_path), "mtp", *small, "--depth", "2")
    assert out.count("held out, temperature") == 4
    out = run(
        *("accept", str(SHIPPED), str(tmp_path), "mtp"),
        *("--arms", "chain:1", "tree:4x2", "--prompts", "2", "--tokens", "8"),
    )
    # Greedy answers of both engines are equal, of which the last column tells.
    assert sum(line.endswith("| 0 |") for line in out.splitlines()) == 2
    pair = tmp_path / "pair"
    pair.mkdir()
    (pair / "prompts.json").write_text((SHIPPED / "prompts.json").read_text())
    accepting.mimo_of(SHIPPED / "target", tmp_path / "mtp", pair / "target")
    file = tmp_path / "race.json"
    out = run(
        *("race", str(pair), "mtp", "--nodes", "3", "--topk", "2", "--auto-steps", "2"),
        *("--lengths", "1", "2", "--batch", "1", "2", "--temperature", "0", "--tokens", "16"),
        *("--prompt", "80", "--rounds", "1", "--ours", "", "--max-model-len", "128"),
        *("--kv-cache-bytes", "67108864", "--json", str(file), "--fixed", "2"),
    )
    assert "| 1 | 0 | 1 | block:" in out
    found = json.loads(file.read_text())["cells"]
    names = {"block:1", "block:2", "auto:3", "auto:3@2"}
    assert [set(cell["found"]) for cell in found] == [names] * 2
    assert {cell["found"]["auto:3@2"][0]["drafted"] for cell in found} == {2.0}
    assert (
        len({cell["found"][name][0]["sent"] for cell in found[:1] for name in cell["found"]}) == 1
    )
