"""The whole vision benchmark on tiny towers and pretended graphs.

It runs in a process of its own, because the benchmark replaces parts of vLLM and of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# With such small towers, two threads would wait for each other longer than they work.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("vit") / "vit.json"
    command = [sys.executable, "-P", "-m", "vllm_graft", "bench", "vit", "--device", "cpu"]
    command += ["--tiny", "--matrix", "60", "--stream", "30", "--stream-eager", "20", "--warm", "1"]
    command += ["--blocks", "2", "--per-block", "1", "--memory", "32", "--json", str(file)]
    done = subprocess.run(
        command,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return {**found, "printed": done.stdout}


def test_every_section_of_every_tower(report: dict[str, Any]) -> None:
    assert report["failed"] == []
    for tower in ("qwen3", "qwen2.5"):
        rows = [row for row in report["speed"] if row["tower"] == tower]
        assert [row["arm"] for row in rows] == ["eager", "stock", "ours"] * 3
        assert all(row["median"] > 0 and row["runs"] == 2 for row in rows)
        assert all(row["graphed"] == (row["arm"] != "eager") for row in rows)
        for section in ("failures", "matrix", "stream", "memory"):
            assert f"## {tower}: {section}" in report["printed"]
            assert any(row["tower"] == tower for row in report[section])


def test_known_failures_of_stock_are_none_of_ours(report: dict[str, Any]) -> None:
    raised = {
        (row["tower"], row["case"]): row["raised"]
        for row in report["failures"]
        if row["arm"] == "stock"
    }
    for tower in ("qwen3", "qwen2.5"):
        assert raised[tower, "image_embeds"] == "KeyError: 'pixel_values'"
        assert raised[tower, "video of 80 frames"].startswith("RuntimeError: The size of tensor")
        assert raised[tower, "image, 8 items / 64 frames"] == ""
    ours = [row for row in report["failures"] if row["arm"] == "ours"]
    assert len(ours) == 6
    assert all(row["error"] is not None and row["error"] < 1e-5 for row in ours)
    assert {row["case"] for row in ours if row["graphed"] == 0} == {"image_embeds"}


def test_the_matrix_compares_every_batch(report: dict[str, Any]) -> None:
    for found in report["matrix"]:
        assert found["crashes"] == []
        tiers = found["tiers"]
        compared = sum(tally["batches"] for tally in tiers.values())
        assert compared == sum(found["kinds"].values()) == 30
        assert all(tally["worst"] < 1e-5 for tally in tiers.values())
        assert tiers["exact"]["identical"] == tiers["exact"]["batches"] > 0
        assert tiers["bucket"]["batches"] > 0


def test_streams(report: dict[str, Any]) -> None:
    requests = {(row["tower"], row["arm"]): row["requests"] for row in report["stream"]}
    assert requests["qwen3", "ours"] == requests["qwen2.5", "stock"] == 30
    assert requests["qwen3", "eager"] == 20
    assert [row["budget"] for row in report["memory"]] == [32, 32]
