"""The serving benchmark's table, from made-up measurements, and how its servers are told."""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.real_pair import __main__ as command
from benchmarks.real_pair import cells, serving
from benchmarks.real_pair.cells import Cell, Measured
from vllm_graft.bench.common.report import BenchmarkError

ONE, SIXTEEN = Cell(0.0, 1), Cell(0.0, 16)


def measured(tokens: float, **others: Any) -> Measured:
    zeros = dict.fromkeys(Measured.__dataclass_fields__, 0)
    return Measured(**{**zeros, "tokens": tokens, "acceptance": 1.0, **others})


def test_the_strongest_opponent_of_each_cell_counts() -> None:
    first = {
        ONE: {
            "auto:63+fp8": [measured(90), measured(130), measured(120)],
            "block:3": [measured(80)],
            "block:5": [measured(100)],
            "none": [measured(30)],
        },
        SIXTEEN: {"auto:63+fp8": [measured(300)], "block:3": [measured(400)]},
    }
    # On another GPU, where all is twice as fast, another chain comes nearer.
    second = {ONE: {"graft": [measured(240)], "adaptive:5": [measured(220)]}}
    found = cells.contests([first, second])
    assert [(each.cell, each.stock, each.ours) for each in found] == [
        (ONE, "adaptive:5", "graft"),
        (SIXTEEN, "block:3", "auto:63+fp8"),
    ]
    assert [each.ratio for each in found] == pytest.approx([240 / 220, 0.75])
    [alone, _] = cells.contests([first])
    assert alone.stock == "block:5"
    assert alone.ratio == pytest.approx(1.2)
    assert cells.contests([{ONE: {"graft": [measured(1)]}}]) == []


def test_the_table_shows_both_sides() -> None:
    ours = measured(120, ttft_p50=10, itl_p99=3.25, goodput=2.5, in_time=1, acceptance=4)
    stock = measured(100, ttft_p50=12, itl_p99=4, goodput=2, in_time=0.875, acceptance=3)
    text = cells.headline([{ONE: {"graft": [ours], "block:5+fp8": [stock]}}])
    [row] = text.splitlines()[2:]
    parts = [part.strip() for part in row.strip("|").split("|")]
    assert parts[:6] == ["temperature 0, 1 in flight", "block:5+fp8", "100", "graft", "120", "1.20"]
    assert parts[6:8] == ["3.00 / 4.00", "12.0 / 10.0"]
    assert parts[-3:] == ["4.0 / 3.2", "2.00 / 2.50", "88% / 100%"]
    every = cells.every_arm({ONE: {"graft": [ours], "none": [stock]}})
    assert every.endswith("| temperature 0, 1 in flight | 120 (4.00) | 100 (3.00) |")


def test_an_arm_sustains_a_rate_if_it_meets_the_objectives_up_to_there() -> None:
    late, slow, good = (
        measured(1, itl_p99=9, ttft_p99=1001),
        measured(1, itl_p99=25.5, ttft_p99=80),
        measured(1, itl_p99=9, ttft_p99=80),
    )
    run = {
        Cell(0.0, 64, 8.0): {"graft": [good], "block:3": [good], "none": [late]},
        Cell(0.0, 64, 12.0): {"graft": [good], "block:3": [slow], "none": [good]},
        Cell(0.0, 64, 16.0): {"graft": [late], "block:3": [good]},
        Cell(1.0, 64, 8.0): {"graft": [good], "block:3": [late]},
        ONE: {"graft": [late]},
    }
    first, second = cells.sustained(run).splitlines()[2:]
    assert first == (
        "| chat, temperature 0 | 12 (12: 9.0, 80; 16: 9.0, 1001) | 8 (8: 9.0, 80; 12: 25.5, 80) "
        "| 0 (8: 9.0, 1001) | 1.50 |"
    )
    assert second.endswith("| 0 (8: 9.0, 1001) | 0 () | - |")


def test_a_result_of_the_serving_benchmark_is_read() -> None:
    found: dict[str, Any] = {
        f"p{share}_{kind}_ms": share + 0.5 for share in (50, 99) for kind in KINDS
    }
    found |= {"output_throughput": 12.0, "completed": 3, "total_output_tokens": 60, "duration": 5.0}
    found["ttfts"] = [0.02, 0.5, *([0.01] * 9)]
    read = Measured.of(found | {"request_goodput": None})
    assert (read.tokens, read.goodput, read.acceptance) == (12.0, 0.0, 1.0)
    assert (read.ttft_p50, read.itl_p99) == (50.5, 99.5)
    assert read.slowest[:2] == [(1, 500.0), (0, 20.0)]
    assert len(read.slowest) == 8
    assert Measured.of(found | {"spec_decode_acceptance_length": 2.5}).acceptance == 2.5
    # 2 of the 3 requests, within 5 s.
    good = Measured.of(found | {"request_goodput": 0.4})
    assert good.in_time == pytest.approx(2 / 3, abs=1e-4)
    assert str(good).endswith("goodput 0.40, 67% in time")


KINDS = ("ttft", "itl", "tpot")


def test_turns_have_requests_for_their_seconds() -> None:
    assert cells.most_requests(Cell(0, 1), 18) == 60
    assert cells.most_requests(Cell(0, 64), 0.1) == 128
    assert cells.most_requests(Cell(0, 64, 4.0), 10) == 40


def test_servers_are_told_what_arms_are() -> None:
    pair = Path("pair")
    flags = serving.arm_flags("block:5+fp8", pair, 8, 12, 64)
    assert flags[0] == "--speculative-config"
    told = json.loads(flags[1])
    assert told["rejection_sample_method"] == "block"
    assert (told["num_speculative_tokens"], told["quantization"]) == (5, "fp8_per_channel")
    assert serving.arm_flags("none", pair, 8, 12, 64) == []
    ours = serving.arm_flags("auto:63+fp8", pair, 8, 12, 64)
    assert json.loads(ours[3])["graft"]["tree"]["steps"] == 12
    assert serving.arm_flags(serving.GRAFT, pair, 8, 12, 64)[2:] == [
        "--additional-config.graft",
        "auto",
    ]
    for name, value in (("graft+ngram", True), ("graft-ngram", False)):
        changed = json.loads(serving.arm_flags(name, pair, 8, 12, 64)[3])["graft"]["tree"]
        assert (changed["nodes"], changed["head_dtype"], changed["ngram"]) == (63, "fp8", value)
    assert told["model"] == "pair/eagle3"
    assert serving.arm_flags(serving.ALONE, pair, 8, 12, 64) == [
        "--additional-config.graft",
        "auto",
    ]
    with pytest.raises(BenchmarkError, match="an arm of its own"):
        serving.arm_flags("block:3,5", pair, 8, 12, 64)


def test_a_method_may_stand_before_an_arm() -> None:
    pair = Path("pair")
    chain, tree, graft = (
        [json.loads(each) for each in serving.arm_flags(name, pair, 8, 12, 64) if each[0] == "{"]
        for name in ("draft_model/block:3", "draft_model/tree:15+topk4+steps3", "draft_model/graft")
    )
    for told in (chain, tree, graft):
        assert told[0]["method"] == "draft_model"
        assert told[0]["model"] == "pair/draft_model"
    assert tree[1]["graft"]["tree"] == {"topk": 4, "steps": 3, "recurrent": True}
    assert len(chain) == 1
    assert [each[0]["num_speculative_tokens"] for each in (chain, tree, graft)] == [3, 15, 3]
    assert [cells.ours(name) for name in ("draft_model/tree:15", "draft_model/block:3")] == [1, 0]


def served(*given: str) -> argparse.Namespace:
    return command.parser().parse_args(["serve", "pair", *given])


def test_servers_share_their_flags() -> None:
    shared = serving.server_flags(
        Path("pair"), served("--kv-cache-bytes", "77", "--sizes", "1", "2", "--server-flags=--x y")
    )
    assert shared[0] == "pair/target"
    assert shared[-2:] == ["--x", "y"]
    assert shared[shared.index("--kv-cache-memory-bytes") + 1] == "77"
    assert "--kv-cache-memory-bytes" not in serving.server_flags(Path("pair"), served())


def test_a_load_is_open_or_closed() -> None:
    load = serving.Load({"chat": (Path("chat.jsonl"), 9)}, Path("target"))
    server: Any = SimpleNamespace(address="http://here")
    closed = serving.client_flags(server, load, Cell(0.6, 4), 20)
    assert closed[closed.index("--dataset-path") + 1] == "chat.jsonl"
    assert closed[-2:] == ["--max-concurrency", "4"]
    assert closed[closed.index("--temperature") + 1] == "0.6"
    opened = serving.client_flags(server, load, Cell(0.6, 64, 2.5), 20)
    assert opened[-2:] == ["--request-rate", "2.5"]


def test_arms_take_turns_in_either_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    seeds: list[int] = []

    def measure(server: Any, load: serving.Load, cell: Cell, requests: int, seed: int) -> Measured:
        order.append(server)
        seeds.append(seed)
        if server == "broken":
            raise BenchmarkError("it fell over")
        return measured(100.0 * len(order), requests=requests)

    monkeypatch.setattr(serving, "measure", measure)
    file = str(tmp_path / "race.json")
    load = serving.Load({"chat": (Path("a"), 17)}, Path("b"))
    race = serving.Race(load, file, {"seconds": "9"})
    running: Any = {"block:5": "stock", "graft": "ours"}
    race.run(running, [ONE, SIXTEEN], 2, 1.0, math.inf)
    assert order == ["stock", "ours", "ours", "stock", "ours", "stock", "stock", "ours"]
    # All arms of a round are asked alike, and no request comes twice in a turn.
    assert seeds == [0] * 4 + [1] * 4
    assert race.found[SIXTEEN]["graft"][0].requests == 17
    assert cells.read(file) == race.found
    assert [turn.tokens for turn in race.found[ONE]["graft"]] == [200, 500]
    # An arm that fails is left out, and the others go on.
    more = {"bad": "broken", **running}
    race.run(more, [ONE], 2, 1.0, math.inf)
    assert order[8:] == ["broken", "stock", "ours", "ours", "stock"]
    assert more == running
    # A cell that would not end in time is left out.
    race.run(running, [ONE], 3, 100.0, time.perf_counter() + 150.0)
    assert len(order) == 13


def test_a_workload_is_known_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "edits.jsonl").write_text("{}\n{}\n")
    given = f"edits={tmp_path}/edits.jsonl"
    assert served("--workloads", "humaneval", given).workloads == ["humaneval", given]
    for bad in ("edits", "edits=nothing.jsonl"):
        with pytest.raises(SystemExit):
            served("--workloads", bad)
