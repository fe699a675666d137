"""Tables, files, statistics, and the command line of the benchmarks."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_graft import bench, cli
from vllm_graft.base.text_table import markdown
from vllm_graft.bench.common import report
from vllm_graft.bench.common.arm import percentile
from vllm_graft.bench.common.report import BenchmarkError, Panel


def test_table() -> None:
    found = markdown(["a", "b"], [["1", "2"], ["3", "4"]])
    assert found.splitlines() == ["| a | b |", "|---|---|", "| 1 | 2 |", "| 3 | 4 |"]


def test_json(tmp_path: Path) -> None:
    report.write_json(str(tmp_path / "x.json"), {"rows": [1], "where": tmp_path})
    assert json.loads((tmp_path / "x.json").read_text()) == {"rows": [1], "where": str(tmp_path)}


def test_a_plot_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report.require_plotting(None)
    with pytest.raises(BenchmarkError, match=r"--plot x\.svg: matplotlib is not installed"):
        report.require_plotting("x.svg")


def test_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    class Axes:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: drawn.append((name, args, kwargs))

    class Figure:
        def __init__(self, **_: Any) -> None: ...

        def add_subplot(self, *place: int) -> Axes:
            drawn.append(("add_subplot", place, {}))
            return Axes()

        def savefig(self, file: str) -> None:
            drawn.append(("savefig", (file,), {}))

    fake: Any = type(sys)("matplotlib")
    fake.figure = type(sys)("matplotlib.figure")
    fake.figure.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", fake)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", fake.figure)
    monkeypatch.setattr(report, "require_plotting", lambda file: None)
    report.plot("x.svg", [Panel("t", "patches", "ms", {"ours": [(4, 2), (1, 3)]}, "xy")])
    calls = {name: args for name, args, _ in drawn}
    assert calls["add_subplot"] == (1, 1, 1)
    assert calls["plot"] == ([1, 4], [3, 2])
    assert calls["set_xticks"] == ([1, 4], ["1", "4"])
    assert calls["set_yscale"] == ("log",)
    assert calls["savefig"] == ("x.svg",)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_real_plot(tmp_path: Path) -> None:
    file = tmp_path / "x.svg"
    report.plot(str(file), [Panel("t", "x", "y", {"ours": [(1, 3), (4, 2)]}, "x")])
    assert "<svg" in file.read_text()


def test_percentile() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.99) == 99
    assert percentile(values, 0) == 1
    assert percentile([7.0], 0.5) == 7
    with pytest.raises(ValueError, match="0 values"):
        percentile([], 0.5)


def test_every_benchmark_has_a_sub_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    shown = capsys.readouterr().out
    for name in bench.BENCHMARKS:
        assert f"{name} " in shown
        assert bench.load(name).SUMMARY in " ".join(shown.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["vit", "model", "--sizes", "small"], "invalid int value"),
        (["vit", "model", "--arms", "theirs"], "invalid choice"),
        (["hicache", "model", "--parts", "race"], "invalid choice"),
        (["trees", "model"], "--dataset"),
        (["trees", "model", "--requests-in-flight", "4", "0"], "'0': give a number from 1 on"),
    ],
)
def test_wrong_arguments(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *command])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_arguments_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(bench.load("vit"), "run", lambda *given: seen.append(given) or 1)
    given = ["--rounds", "5", "--max-model-len", "64", "--sizes", "64", "--output", "x"]
    # Not an abbreviation of a flag of ours: vLLM's parser judges it.
    assert cli.main(["bench", "vit", "model", *given, "--round", "3"]) == 1
    [(arguments, flags)] = seen
    assert flags == ["model", "--max-model-len", "64", "--round", "3"]
    assert (arguments.rounds, arguments.sizes, arguments.output) == (5, [64], "x")
    assert arguments.arms == ["off", "stock", "ours"]
    assert arguments.plot is None


def test_a_file_without_a_folder_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "gone" / "x.json")
    assert cli.main(["bench", "vit", "model", "--output", file]) == 1
    assert f"--output {file}: the folder does not exist" in capsys.readouterr().err
    report.require_folder("--output", "x.json")


@pytest.mark.parametrize("name", [*bench.BENCHMARKS])
def test_a_model_comes_first(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--dataset", "random"] if name == "trees" else []
    assert cli.main(["bench", name, *more, "--max-model-len", "64"]) == 1
    assert f"vllm-graft bench {name}: MODEL comes first" in capsys.readouterr().err
