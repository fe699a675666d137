"""The search for plans without a GPU: tiny problems in the interpreter, with a pretended clock."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.attention.search import __main__ as command
from benchmarks.attention.search import compiling, measuring, points, report
from benchmarks.attention.search.candidates import (
    SHARED_BYTES,
    first_plans,
    later_plans,
    short,
    splits,
    tiles,
)
from benchmarks.attention.search.compiling import parse_resources
from benchmarks.attention.shapes import KvLayer
from vllm_graft.spec_decode.kernels.attention.attention_plan import Plan, Sizes, Tile
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.trees.batch import DraftBatch

TINY = KvLayer("tiny", 4, 2, 64)
NEAR = KvLayer("near", 4, 2, 64, window=40)
PROBLEMS = [
    points.Problem(TINY, 2, 5, 70),
    points.Problem(NEAR, 1, 5, 100),
    points.Problem(TINY, 2, 3, 40, draft=True),
]
CACHE = {"cold_bytes": 1 << 18, "cache_bytes": 1 << 20}


def pretended_timer() -> tuple[Callable[[Callable[[], object]], float], list[int]]:
    """A timer that runs a call once; the first call is the slowest. And how often it was asked."""
    asked: list[int] = []

    def timer(call: Callable[[], object]) -> float:
        call()
        asked.append(len(asked))
        return 100.0 - len(asked)

    return timer, asked


def search(
    problems: list[points.Problem], file: Path | None = None, few: int = 2
) -> tuple[command.Search, list[int]]:
    options = command.parser().parse_args(["--longest", "192", "--few", str(few), "--best", "2"])
    options.json = file
    timer, asked = pretended_timer()
    made = command.Search(problems, options, None, "cpu", timer, timer, 1e9)
    return made, asked


@pytest.mark.parametrize(
    "problems", [PROBLEMS[::2], pytest.param(PROBLEMS, marks=pytest.mark.nightly)], ids=len
)
def test_all_problems_are_searched(
    problems: list[points.Problem],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "CALLS", 2)
    monkeypatch.setattr(command, "VARIED", 1)
    file = tmp_path / "search.json"
    made, asked = search(problems, file)
    made.run(float("inf"), CACHE)
    assert asked
    written = json.loads(file.read_text())
    assert [each["name"] for each in written["problems"]] == [each.name for each in problems]
    for found, plain in zip(made.found, written["problems"]):
        assert found.today is not None
        assert not found.today.failure
        assert found.today.plan == Plan(found.today.plan.tile, found.today.plan.splits)
        # All plans of a problem compute what the reference says, the varied ones, too.
        assert [each.failure for each in found.timings] == [""] * len(found.timings)
        assert len(found.timings) >= 3
        best = [each.best for each in found.ranked()]
        assert best == sorted(best)
        assert plain["timings"][0]["short"] == short(found.ranked()[0].plan)
        assert plain["today"]["us"] == found.today.us
    # None of the platform's kernels runs here, and a level of a draft has none.
    assert ["FLASH_ATTN" in each.failures for each in made.found] == [
        not each.draft for each in problems
    ]
    said = capsys.readouterr().out
    assert all(f"{problem.name}: a copy takes" in said for problem in problems)
    assert "today" in said


def test_a_deadline_leaves_problems_out(capsys: pytest.CaptureFixture[str]) -> None:
    made, asked = search(PROBLEMS)
    made.run(0.0, CACHE)
    assert asked == []
    assert capsys.readouterr().out.count("not reached") == len(PROBLEMS)


def test_a_plan_that_computes_wrongly_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CALLS", 1)
    right = measuring.expected_of
    monkeypatch.setattr(measuring, "expected_of", lambda batch: right(batch) * 1.1)
    made, asked = search(PROBLEMS[:1])
    made.run(float("inf"), CACHE)
    [found] = made.found
    assert found.ranked() == []
    assert all(each.failure.startswith("relative error") for each in found.timings)
    assert asked == []
    assert "wrong or not run" in "\n".join(report.lines(found, 2))


def test_errors_of_nan_are_errors() -> None:
    expected = torch.ones(2, 1, 4)
    assert measuring.error_of(expected.clone(), expected) == 0
    assert not measuring.error_of(expected * float("nan"), expected) <= measuring.RELATIVE
    assert measuring.error_of(expected * 1.5, expected) == 0.5


def test_tables_are_those_of_an_engine() -> None:
    """So all lengths of a problem share what is compiled, and only the keys' blocks are read."""
    [batch] = points.batches_of(PROBLEMS[0], 1, "cpu", 4096, **CACHE)
    assert batch.block_table.shape == (2, 256)
    assert batch.max_seq_len == 4096
    assert not batch.block_table[:, 5:].any()
    [level] = points.batches_of(PROBLEMS[2], 1, "cpu", 4096, **CACHE)
    assert isinstance(level, DraftBatch)
    assert level.prefix_lens.tolist() == [40, 40]
    assert level.level == points.STEPS - 1


def test_shards_are_all_problems_once() -> None:
    parts = [points.shard(f"{number}/3") for number in (1, 2, 3)]
    assert sorted(each.name for part in parts for each in part) == sorted(
        each.name for each in points.PROBLEMS
    )
    groups = [{each.group for each in part} for part in parts]
    assert not groups[0] & groups[1]
    assert len({each.name for each in points.PROBLEMS}) == len(points.PROBLEMS)
    for wrong in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(ValueError, match="I/N"):
            points.shard(wrong)


SIZES = Sizes(32, 128, torch.bfloat16, 16, 8, 4096, most_splits=16, multiprocessors=132)


@pytest.mark.parametrize(
    "sizes",
    [SIZES, SIZES._replace(rows=128, num_reqs=1), SIZES._replace(rows=64, head=256),
     SIZES._replace(rows=128, head=512, num_reqs=1), SIZES._replace(rows=8, num_reqs=64)],
)  # fmt: skip
def test_candidates_fit_the_device(sizes: Sizes) -> None:
    found = tiles(sizes)
    assert 8 <= len(found) <= 60
    for tile in found:
        assert tile.rows >= 16
        assert tile.rows * sizes.head <= 128 * 32 * tile.warps
        assert (tile.stages - 1) * 4 * tile.keys * sizes.head <= SHARED_BYTES
        counts = splits(sizes, tile)
        assert counts
        assert all(1 <= each <= sizes.most_splits for each in counts)
    plans = first_plans(sizes, overlapped=True)
    assert len(set(plans)) == len(plans)
    assert all(plan.overlapped == (plan.splits > 1) for plan in plans)


def test_plans_are_the_same_at_all_lengths() -> None:
    problem = points.Problem(points.LLAMA, 4, 8, 350)
    space = AttentionWorkspace.allocate(8, 8, 32, 128, 8, "cpu")
    sizes = [
        measuring.sizes_of(replace(problem, context=context), space, 4096)
        for context in (350, 2048, 8192)
    ]
    assert sizes[0] == sizes[1] != sizes[2]


def test_later_plans_change_one_thing() -> None:
    best = Plan(
        Tile(32, 64, 4, 3), 2, ahead=True, skip_empty=True, combine_width=128, overlapped=True
    )
    changed = later_plans(best)
    assert best not in changed
    assert len(set(changed)) == len(changed)
    assert any(not plan.overlapped for plan in changed)
    assert {plan.partials for plan in changed} == {torch.float32, torch.float16, torch.bfloat16}
    assert later_plans(best._replace(splits=1)) == [best._replace(splits=1, ahead=False)]
    assert short(best) == "32x64 w4 s3 /2 ahead skip pdl c4x128"


def test_a_compiler_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PATIENCE", 0)
    assert compiling.outcome(Future()).error.startswith("TimeoutError")
    done: Future[compiling.Built] = Future()
    done.set_result(compiling.Built("split_kernel", 1.0, 168))
    assert compiling.outcome(done).error == ""
    timing = measuring.Timing(Plan(Tile(32, 64, 4, 3)), us=1.0)
    assert timing.best == 1.0
    timing.failure = "it did not run"
    assert timing.best == float("inf")


def test_what_kernels_take_is_read() -> None:
    said = "Function split_kernel:\n REG:168 STACK:48 SHARED:77824 LOCAL:0 CONSTANT[0]:720"
    assert parse_resources(said) == (168, 48)
    assert parse_resources("") == (-1, -1)


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(["--seconds", "1"]) == 2
    assert "needs a GPU" in capsys.readouterr().err
