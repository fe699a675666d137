"""Workloads of the vision benchmark, and its computations from measurements."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.common.timing import Deadline
from vllm_graft.bench.vision import add_arguments, matrix, speed, stream
from vllm_graft.bench.vision import image_cases as cases
from vllm_graft.bench.vision.arms import Arm, Machine, ours
from vllm_graft.bench.vision.image_cases import Batch
from vllm_graft.bench.vision.random_towers import TOWERS, Limits, Pixels, tiny
from vllm_graft.bench.vision.session import MEMORY_HEADER, Session, memory_line, panels


def test_images_are_whole_merged_patches() -> None:
    assert cases.image(224, 448, 16) == (1, 14, 28)
    assert cases.image(336, 336, 16) == (1, 20, 20)
    assert cases.image(1, 5000, 14) == (1, 2, 358)


def test_named_workloads() -> None:
    assert cases.single_sizes(14)["448 px"].patches == 32 * 32
    assert cases.several(14)["20 x 336 px"].grids == ((1, 24, 24),) * 20


def test_the_stream_repeats_few_grids_often() -> None:
    stream_of = cases.natural_stream(14, 2000)
    assert stream_of == cases.natural_stream(14, 2000)
    assert stream_of != cases.natural_stream(14, 2000, seed=1)
    counts = Counter(batch.grids for batch in stream_of)
    assert 120 < len(counts) <= 200
    common = [count for _, count in counts.most_common(2)]
    # By Zipf's law over 200 ranks the first has 17 %, the second half of that.
    assert common[0] / 2000 == pytest.approx(0.17, abs=0.03)
    assert common[1] / 2000 == pytest.approx(0.085, abs=0.03)
    areas = sorted(math.prod(grid) for (grid,) in counts)
    # It is above 448 x 448, because small grids coincide more often and count once.
    assert 32 * 32 < areas[len(areas) // 2] < 40 * 40
    assert max(max(grid[1:]) for (grid,) in counts) <= 1792 // 14


def test_the_matrix_has_every_kind() -> None:
    batches = list(cases.matrix(600, 14, cap=4096))
    assert len(batches) == 600
    assert {batch.kind for batch in batches} == {
        "one",
        "group",
        "mixed",
        "segments",
        "video",
        "tail",
    }
    assert max(batch.patches for batch in batches) <= 4096
    assert all(rows % 2 == columns % 2 == 0 for b in batches for _, rows, columns in b.grids)
    frames = [batch.grids[0][0] for batch in batches if batch.modality == "video"]
    assert max(frames) > 100
    assert min(frames) < 5
    layouts: dict[int, set[tuple[cases.Grid, ...]]] = {}
    for batch in batches:
        if batch.kind == "segments":
            layouts.setdefault(batch.patches, set()).add(batch.grids)
    assert max(map(len, layouts.values())) >= 3


def test_relative_error() -> None:
    one, other = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    assert matrix.relative_error([one, other], [one, one]) == pytest.approx(0.1)
    assert matrix.relative_error([one * float("nan")], [one]) == float("inf")
    assert matrix.identical([one], [one.clone()])
    assert not matrix.identical([one], [other])
    with pytest.raises(ValueError, match=r"shapes .* instead of"):
        matrix.relative_error([one], [one, one])


def test_tiers() -> None:
    assert matrix.tier_of({}, {"exact": 1}) == "exact"
    assert matrix.tier_of({"exact": 3}, {"exact": 3, "bucket": 1}) == "bucket"
    assert matrix.tier_of({}, {"exact": 1, "bucket": 2}) == "mixed"
    assert matrix.tier_of({"exact": 1}, {"exact": 3}) == "exact, cut"
    assert matrix.tier_of({"exact": 1}, {"exact": 1}) == "eager"


def _row(arm: str, median: float, graphed: bool = True) -> speed.SpeedRow:
    return speed.SpeedRow("qwen3", "224 px", 196, arm, median, median, 20, graphed)


def test_speed_ratios() -> None:
    rows = [_row("eager", 16.0, False), _row("stock", 3.0), _row("ours", 2.0)]
    assert speed.ratios(rows) == {"eager": 8.0, "stock": 1.5, "best": 1.5}
    assert speed.ratios(rows[:2]) == {}
    assert speed.ratios(rows[1:]) == {"stock": 1.5}
    cells = speed.line([*rows[:2], _row("ours", 20.0, False)])
    assert cells == [
        "qwen3",
        "224 px",
        "196",
        "16.00 (16.00)",
        "3.00 (3.00)",
        "20.00 (20.00)*",
        "-",
        "-",
        "0.80",
        "0.15",
        "0.15",
    ]
    assert len(speed.header(["eager", "stock", "ours"])) == len(cells)
    parts = speed.SpeedRow("qwen3", "224 px", 196, "ours", 2.0, 2.1, 20, True, 0.06, 1.9)
    assert speed.line([parts])[3:6] == ["2.00 (2.10)", "0.06", "1.90"]
    assert not _row("eager+compile", 1.0, False).answered_by_model


def test_streams_are_compared_over_what_both_answered() -> None:
    ours = stream.StreamRow("t", "ours", 1.0, [(50, 1.0), (100, 1.5)], 100, 0.03)
    eager = stream.StreamRow("t", "eager", 0.0, [(50, 4.0)], 50)
    assert stream.faster(ours, eager) == (0.25, 50)
    assert stream.faster(ours, stream.StreamRow("t", "eager", 0.0)) is None
    assert stream.line(ours, ours)[6] == "0.03 s, 2.0 %"
    assert stream.line(eager, ours)[-1] == "0.25 (50)"


def test_a_budget_that_is_passed_is_named() -> None:
    row = stream.StreamRow("t", "ours", 1.0, requests=7, bytes=65 << 20)
    row.statistics = {"bytes": 60 << 20, "items": {"exact": 5, "eager": 2}}
    assert memory_line(row, 64) == ["t", "64", "65.0", "NO", "60.0", "7", "5, 0, 2"]
    assert memory_line(row, 65)[3] == "yes"
    assert len(MEMORY_HEADER) == len(memory_line(row, 64))


class Moody(Arm):
    """A session that raises in one of the arms of a section."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.name == "stock":
            raise RuntimeError("no luck")


def test_an_arm_that_raises_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    file = tmp_path / "vit.json"
    given = ["--device", "cpu", "--tiny", "--towers", "qwen3", "--stream", "4", "--warm", "1"]
    arguments = parser.parse_args(given)
    arguments.json, arguments.plot = str(file), None
    measured = Session(arguments)
    monkeypatch.setattr(measured, "_load_tower", lambda: None)
    monkeypatch.setattr(measured, "_model", lambda kind: Model())
    monkeypatch.setattr(
        "vllm_graft.bench.vision.stream.make",
        lambda kind, model, machine: Moody(kind, model, machine),
    )
    monkeypatch.setattr(
        "vllm_graft.bench.vision.session.make",
        lambda kind, model, machine: Moody(kind, model, machine),
    )
    measured.pixels = Pixels(tiny(TOWERS["qwen3"]), 512, "cpu", torch.float32)
    for section in ("stream", "speed"):
        measured._section(section, tiny(TOWERS["qwen3"]))
        saved = json.loads(file.read_text())
        assert {row["arm"] for row in saved[section]} == {"eager", "ours"}
    assert saved["failed"] == [
        "qwen3 stream, stock: RuntimeError('no luck')",
        "qwen3 speed, stock: RuntimeError('no luck')",
    ]
    assert all(row["host"] > 0 and row["replay"] is None for row in saved["speed"])


def test_panels() -> None:
    report = {
        "arguments": {"towers": ["qwen3"]},
        "speed": [
            {"tower": "qwen3", "workload": "224 px", "arm": "ours", "patches": 196, "median": 2.0},
            {"tower": "qwen3", "workload": "4 x 336 px", "arm": "ours", "patches": 9, "median": 9},
        ],
        "stream": [{"tower": "qwen3", "arm": "ours", "cumulative": [(50, 1.0)]}],
    }
    one, other = panels(report)
    assert one.series == {"ours": [(196, 2.0)]}
    assert other.series == {"ours": [(50, 1.0)]}


def test_pixels_of_two_calls_differ() -> None:
    tower = tiny(TOWERS["qwen3"])
    pixels = Pixels(tower, 64, "cpu", torch.float32)
    batch = Batch("video", ((2, 4, 4), (1, 2, 2)))
    values, others = pixels.of(batch), pixels.of(batch, 1)
    assert values["pixel_values_videos"].shape == (36, 3 * 2 * 16 * 16)
    assert values["video_grid_thw"].tolist() == [[2, 4, 4], [1, 2, 2]]
    assert not torch.equal(values["pixel_values_videos"], others["pixel_values_videos"])
    with pytest.raises(ValueError, match="400 patches, of 128"):
        pixels.of(Batch("image", ((1, 20, 20),)))


def test_a_runner_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match=r"--runner vllm_graft\.nowhere:Runner: .* cannot be"):
        ours("vllm_graft.nowhere:Runner")


class Manager:
    """A manager that answers with the model's embeddings, and now and then with others."""

    def __init__(self) -> None:
        self.calls = 0
        self.replays = Counter[str]()

    def execute(self, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor] | None:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("bad\nluck")
        if self.calls == 3:
            return None
        self.replays["bucket" if self.calls == 4 else "exact"] += 1
        return [tensor + (self.calls == 4) for tensor in Model().embed_multimodal(**inputs)]

    def report(self) -> dict[str, Counter[str]]:
        return {"replays": self.replays}


class Model:
    """A model that sums up each item's pixels."""

    visual = SimpleNamespace()

    def embed_multimodal(self, **inputs: torch.Tensor) -> list[torch.Tensor]:
        pixels, grids = inputs.values()
        return [part.sum(0, keepdim=True) for part in pixels.split(grids.prod(-1).tolist())]


def test_the_matrix_counts_and_goes_on_after_a_crash(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine("cpu", torch.float32, Limits())
    arm = Arm("ours", Model(), machine, Manager())
    pixels = Pixels(tiny(TOWERS["qwen3"]), 64, "cpu", torch.float32)
    batches = [Batch("image", ((1, 2, 2), (1, 2, 4)))] * 5
    eager = Arm("eager", Model(), machine)
    found = matrix.compare("t", eager, arm, batches, pixels, Deadline(None), split_every=1)
    assert found.crashes == [f"{batches[0]}: RuntimeError: bad\nluck"]
    assert {name: (t.batches, t.identical) for name, t in found.tiers.items()} == {
        "exact": (2, 2),
        "eager": (1, 1),
        "bucket": (1, 0),
    }
    assert found.tiers["bucket"].worst > 0.01
    assert found.split.batches == found.split.identical == 4
    assert "bucket 0/1 identical" in found.brief()
    assert [cells[1] for cells in found.lines()] == [
        "bucket",
        "eager",
        "exact",
        "(eager, item by item)",
    ]
