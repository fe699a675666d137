"""The whole vision benchmark on tiny towers, with vLLM's own manager in place of ours.

In a process of its own: the benchmark replaces parts of vLLM and of torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Two threads wait for each other longer than they work, with towers so small.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STOCK = "vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("vit") / "vit.json"
    command = [sys.executable, "-P", "-m", "vllm_graft", "bench", "vit", "--device", "cpu"]
    command += ["--tiny", "--matrix", "24", "--stream", "60", "--stream-eager", "50", "--warm", "1"]
    command += ["--blocks", "2", "--per-block", "1", "--memory", "8", "--json", str(file)]
    done = subprocess.run(
        [*command, "--runner", STOCK],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
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


def test_known_failures_of_stock_are_seen(report: dict[str, Any]) -> None:
    raised = {
        (row["tower"], row["case"]): row["raised"]
        for row in report["failures"]
        if row["arm"] == "stock"
    }
    for tower in ("qwen3", "qwen2.5"):
        assert raised[tower, "image_embeds"] == "KeyError: 'pixel_values'"
        assert raised[tower, "video of 80 frames"].startswith("RuntimeError: The size of tensor")
        assert raised[tower, "image, 8 items / 64 frames"] == ""


def test_the_matrix_goes_on_after_a_crash(report: dict[str, Any]) -> None:
    for found in report["matrix"]:
        compared = sum(tally["batches"] for tally in found["tiers"].values())
        assert compared + len(found["crashes"]) == sum(found["kinds"].values()) == 12
        assert all(tally["worst"] < 1e-5 for tally in found["tiers"].values())
        assert all("size of tensor" in crash for crash in found["crashes"])
    assert any(found["crashes"] for found in report["matrix"])


def test_streams(report: dict[str, Any]) -> None:
    requests = {(row["tower"], row["arm"]): row["requests"] for row in report["stream"]}
    assert requests["qwen3", "ours"] == requests["qwen2.5", "stock"] == 60
    assert requests["qwen3", "eager"] == 50
    assert [row["budget"] for row in report["memory"]] == [8, 8]


def test_a_runner_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "vllm_graft", "bench", "vit", "--device", "cpu"]
    command += ["--tiny", "--sections", "stream", "--arms", "ours", "--towers", "qwen3"]
    done = subprocess.run(
        [*command, "--runner", "vllm_graft.nowhere:Runner"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "--runner vllm_graft.nowhere:Runner" in done.stderr
