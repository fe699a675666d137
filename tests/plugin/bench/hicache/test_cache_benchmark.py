"""The benchmark's own arithmetic; measurements themselves are made on a GPU, by hand."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from vllm_graft.bench.hicache import cache_arms as arms
from vllm_graft.bench.hicache import cache_report as report
from vllm_graft.bench.hicache import command, run
from vllm_graft.bench.hicache.model_sizes import TINY, Sizes
from vllm_graft.bench.hicache.prompt_driver import random_prompt

MODEL = Path("model")


def plan(name: str, device: str = "cuda") -> arms.Plan:
    return arms.Plan(name, MODEL, device, dataclasses.replace(TINY, host_gib=2**-20))


def test_arms_differ_in_their_connector_only() -> None:
    assert arms.transfer_config(plan("none")) == {}
    # This is exactly what `--kv-offloading-size` does.
    assert arms.transfer_config(plan("native")) == {"kv_offloading_size": 2**-20}
    ours = arms.transfer_config(plan('ours:{"load": "async"}'))["kv_transfer_config"]
    assert ours["kv_connector"] == "HiCacheConnector"
    assert ours["kv_connector_extra_config"] == {"host_bytes": 1024, "load": "async"}
    with pytest.raises(ValueError, match="'theirs'"):
        arms.transfer_config(plan("theirs"))


def test_native_memory_where_shm_is_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    large = dataclasses.replace(plan("native"), sizes=dataclasses.replace(TINY, host_gib=1e9))
    extra = arms.transfer_config(large)["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["spec_name"] == "PrivateMemorySpec"
    assert "/dev/shm is too small" in capsys.readouterr().out


def test_sessions_hold_four_times_the_device() -> None:
    assert Sizes().session_tokens == 4 * Sizes().gpu_tokens
    # The requests that one engine runs at a time fit into the device's cache.
    for sizes in (Sizes(), TINY):
        assert sizes.prefix + sizes.suffix + 1 < sizes.gpu_tokens
        assert (
            sizes.decode_requests * (sizes.decode_prompt + sizes.decode_tokens) < sizes.gpu_tokens
        )
    # The host holds all of them, at 128 KiB per token of an 8B model.
    assert Sizes().session_tokens * 131072 < Sizes().host_gib * 2**30


def test_a_full_hit_leaves_one_token() -> None:
    for sizes in (Sizes(), TINY):
        assert sizes.race_prompt % sizes.block == 1


def test_sizes_can_be_changed() -> None:
    arguments = argparse.Namespace(tiny=False, set=["sessions=8", "capture=1,2", "host_gib=1"])
    sizes = command.sizes_of(arguments)
    assert (sizes.sessions, sizes.capture, sizes.host_gib) == (8, (1, 2), 1.0)
    with pytest.raises(SystemExit, match="seesions"):
        command.sizes_of(argparse.Namespace(tiny=True, set=["seesions=8"]))


def test_prompts_depend_on_their_seed() -> None:
    assert random_prompt("a", 50, 500) == random_prompt("a", 50, 500)
    assert random_prompt("a", 50, 500) != random_prompt("b", 50, 500)


@pytest.mark.parametrize(
    ("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_percentile(share: float, value: float) -> None:
    assert report.percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_comparisons(tmp_path: Path) -> None:
    shown: list[str] = []
    found = report.Report(tmp_path / "rows.json", shown.append)
    for arm, times in {"none": (100, 90), "native": (20, 30), "ours": (10, 12)}.items():
        for ms in times:
            found.add("ttft", arm, {"ms": ms})
    found.add("decode", "ours", {"error": "no answer"})
    found.add("load", "ours", {"turns_per_second": 3.0, "ttft_ms": [1.0] * 99 + [50.0]})
    found.add("load", "native", {"turns_per_second": 2.0, "ttft_ms": [100.0] * 100})
    found.add("race", "async", {"requests": 40, "wrong": 1})
    arms_found = ["none", "native", "ours"]
    values = {what: value for what, value, _ in report.comparisons(found, arms_found)}
    assert values == {
        "TTFT of a host hit, ours / native": 11 / 25,
        "TTFT of a host hit, ours / none": 11 / 95,
        "load turns/s, ours / native": 1.5,
        "load p99 TTFT, ours / native": 0.01,
        "wrong answers of 40 in the race, async loads": 1,
    }
    assert len(json.loads((tmp_path / "rows.json").read_text())) == len(shown) == 10
    # A line of the log has percentiles in place of a hundred values.
    assert '"ttft_ms_p99": 100.0' in shown[-2]
    assert "| ours | 11.0 |" in report.arms_table(found, arms_found)


class StubArm:
    """An engine that answers at once, but raises in `decode`; `native` does not start."""

    def __init__(self, plan: arms.Plan) -> None:
        self.plan, self.name = plan, plan.name
        self.failed: str | None = None
        self.started = False
        self.asked: list[str] = []
        self.limits: list[float] = []

    def begin(self) -> None:
        self.asked.append("begin")

    def ask(self, name: str, *arguments: object) -> None:
        self.asked.append(name)

    def wait(self, limit: float) -> arms.Row:
        self.limits.append(limit)
        if self.name == "native" and self.asked[-1] == "begin":
            return {"error": "no GPU memory"}
        return {"ms": 1.0, "tokens_per_second": 2.0, "turns_per_second": 3.0}

    def call(self, name: str, *arguments: object, limit: float = 120) -> arms.Row:
        self.ask(name, *arguments)
        if name == "decode":
            raise RuntimeError("boom")
        return self.wait(limit)

    def stop(self) -> None:
        self.asked.append("stop")

    def close(self, limit: float) -> None:
        assert limit <= run.CLOSE_SECONDS


def stub_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> run.Run:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    parser.add_argument("--json")
    arguments = parser.parse_args([*words, "--json", str(tmp_path / "rows.json")])
    monkeypatch.setattr(run, "Arm", StubArm)
    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    return run.Run(arguments, TINY)


def test_a_part_that_fails_costs_no_other_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stub_run(tmp_path, monkeypatch, "--seconds", "300")
    one.run(["ttft", "decode", "load", "race"])
    one.close()
    rows = json.loads((tmp_path / "rows.json").read_text())
    found = {(row["part"], row["arm"]): row for row in rows}
    assert found["decode", "all"]["error"] == "RuntimeError: boom"
    assert {("ttft", "ours"), ("load", "ours"), ("race", "async"), ("load", "none")} <= set(found)
    # An engine that did not start is left out of later parts.
    assert found["start", "native"]["error"] == "no GPU memory"
    assert ("ttft", "native") not in found
    # The race is over before the others are waited for, and arms take turns in both orders.
    order = [(row["part"], row["arm"]) for row in rows]
    assert order.index(("race", "layerwise")) < order.index(("start", "none"))
    turns = [row["arm"] for row in rows if row["part"] == "ttft"]
    assert turns == ["none", "ours", "ours", "none", "none", "ours"]


def test_a_run_keeps_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run.time, "perf_counter", lambda: now)
    one = stub_run(tmp_path, monkeypatch, "--seconds", "50")
    assert one.left == 50 - run.CLOSE_SECONDS
    one._spawn(["ttft"])
    one._begin()
    taken = []
    for _, name, _ in one._turns(9, until=now + 10):
        taken.append(name)
        now += 2.0
    # A round takes 6 s: a second one would not end in time.
    assert taken == ["none", "native", "ours"]
    now += 100
    assert one.left == 0.0
    one._ready(one._arms["ours"])
    assert one._arms["ours"].limits == [0.1]  # type: ignore[attr-defined]
