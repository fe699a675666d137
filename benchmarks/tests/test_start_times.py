"""The benchmark of starts, run through on a tiny engine, whose figures mean nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start_times
from tests.support.shipped_pair import SHIPPED
from vllm_graft.spec_decode.startup.clock import PARTS

TINY = ["--tree", "auto:3", "--topk", "2", "--steps", "2", "--max-num-seqs", "2"]


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_start_is_timed_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "starts.json"
    chosen = ["--arms", "late", "--kinds", "cold", "--json", str(found)]
    assert start_times.main([str(SHIPPED), *TINY, *chosen]) == 0
    [row] = json.loads(found.read_text())
    assert (row["arm"], row["start"]) == ("late", "cold")
    assert row["seconds"] >= row["engine"] + row["answer"] > 0
    assert set(row["parts"]) == set(PARTS)
    assert row["ahead"]["why"] == "VLLM_GRAFT_COMPILE_PROCESSES is 0"
    assert "| late | cold |" in " ".join(capsys.readouterr().out.split())


def given(**changes: Any) -> argparse.Namespace:
    values = {
        "pair": SHIPPED,
        "target": None,
        "draft": None,
        "arms": ["ahead", "late", "chain"],
        "kinds": ["cold", "warm"],
        "tree": "auto:3",
        "chain": "chain:2",
        "topk": 2,
        "steps": 2,
        "max_num_seqs": 2,
        "max_model_len": 128,
        "gpu_memory_utilization": 0.5,
        "seconds": 100.0,
    }
    return argparse.Namespace(**{**values, **changes})


def test_starts_for_which_there_is_no_time_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with time, every arm has a cold start and a warm one, over the same caches."""
    made: list[tuple[str, Path]] = []

    def start(arm: str, caches: Path, *args: Any) -> dict[str, Any]:
        made.append((arm, caches))
        return {"seconds": 1.0, "engine": 0.5, "answer": 0.1}

    monkeypatch.setattr(start_times, "start", start)
    rows = start_times.measure(given(), tmp_path)
    assert [(row["arm"], row["start"]) for row in rows] == list(start_times.STARTS)
    assert made == [(arm, tmp_path / arm) for arm, _ in start_times.STARTS]
    rows = start_times.measure(given(seconds=3), tmp_path)
    assert {row["why"] for row in rows} == {"no time left"}
    assert start_times.table(rows).count("no time left") == len(start_times.STARTS)


def test_arms_differ_in_what_is_compared_alone() -> None:
    ahead, late, chain = (
        start_times.engine_options(arm, given()) for arm in ("ahead", "late", "chain")
    )
    assert ahead == late
    assert "additional_config" not in chain


def test_late_compiles_nothing_ahead(tmp_path: Path) -> None:
    found = {arm: start_times.environment(arm, tmp_path) for arm in ("ahead", "late")}
    assert found["late"] == {**found["ahead"], "VLLM_GRAFT_COMPILE_PROCESSES": "0"}


def test_caches_lie_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    found = start_times.environment("ahead", tmp_path)
    assert "TRITON_CACHE_DIR" not in found
    for name in ("TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "CUDA_CACHE_PATH"):
        assert Path(found[name]).is_relative_to(tmp_path)


@pytest.mark.nightly
def test_a_start_that_fails_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--arms", "chain", "--kinds", "cold", "--target", str(tmp_path / "missing")]
    assert start_times.main([str(SHIPPED), *TINY, "--chain", "chain:2", *chosen]) == 1
    assert "chain" in capsys.readouterr().out
