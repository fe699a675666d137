"""The speed bars run through on a tiny pair, where figures mean nothing, and their arithmetic."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import node_counts, step_bytes
from benchmarks.bars import __main__ as program
from benchmarks.bars import contest, engine_probe, step_pace, windows
from benchmarks.bars.windows import Cell, Side, Window
from benchmarks.pair_arms import engine_options, read_arm
from benchmarks.watched_loop import Call, Watched, WatchedLoop
from tests.support.engines.pairs import Pair, Request, answer_all
from tests.support.engines.shipped_pair import SHIPPED
from tests.support.processes import finished
from vllm_graft.bench.common.closed_loop import Ask, Case
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.spec_decode.heads.fp8_head import Fp8Head
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

TINY = ["--max-num-seqs", "4", "--max-model-len", "256", "--kv-cache-bytes", "67108864"]


@pytest.mark.nightly
@pytest.mark.engine
@pytest.mark.timeout(300)
def test_two_engines_take_turns(tmp_path: Path) -> None:
    file = tmp_path / "bars.json"
    arms = ["--chain", "block:2,3", "--tree", "auto:3", "--topk", "2", "--auto-steps", "2"]
    cells = "[[0.6, 1, 3, 2], [0, 1, 2, 2], [0, 2, 2, 4]]"
    given = [str(SHIPPED), "--json", str(file), "--cells", cells, "--tokens", "24"]
    shown = ["--timeline", "1"]
    given += ["--prompt", "100", "--rounds", "1", *shown, *arms, *TINY]
    # It is called as by hand: its engines' processes have to find the package as well.
    command = [sys.executable, "-m", "benchmarks.bars", *given]
    out = finished(*command, cwd=SHIPPED.parents[1])
    written = json.loads(file.read_text())
    windows = written["windows"]
    assert written["settings"]["tree"] == "auto:3"
    assert [tuple(window["cell"].values()) for window in windows] == [
        (0.6, 1, 3, 2), (0, 1, 2, 2), (0, 2, 2, 4),
    ]  # fmt: skip
    for window in windows:
        chain, ours = window["chain"], window["ours"]
        assert window["ratio"] == ours["rate"] / chain["rate"] > 0
        # The chain's acceptance is bounded by its length; our tree has two levels.
        assert 1 <= chain["acceptance"] <= 1 + window["cell"]["chain"]
        assert 1 <= ours["acceptance"] <= 3
        # Both engines get the same prompts and seeds; each cell has others.
        assert chain["sent"] == ours["sent"]
        for side in (chain, ours):
            host = side["host"]
            if host["steps"] > 1:
                assert host["with_update"] > host["host"] > host["sample"] > host["propose"] > 0
    assert len({window["chain"]["sent"] for window in windows}) == 3
    # Without a CUDA device there is nothing to show of a step.
    assert written["steps"] == {f"t 0.6 batch 1 {name}": [] for name in ("chain", "ours")}
    assert [window["bar"] for window in windows] == [1.25, 1.12, None]
    assert all("no CUDA device" in written["device"][bar]["skipped"] for bar in "34")
    for side in (window[name] for window in windows for name in ("chain", "ours")):
        assert sum(of["steps"] * of["tokens"] for of in side["pace"].values()) >= 0.9 * 24
    assert "| 1.25 | " in out
    assert "    ours: " in out
    assert "t 0.6 batch 1: chain:3 " in out
    assert "bar 3: skipped: no CUDA device" in out


class Pipe:
    """An engine that answers at once, with the rates that it was given."""

    def __init__(self, *rates: float, host: float = 1000.0) -> None:
        self.rates, self.host = list(rates), host
        self.wishes: list[Any] = []

    def send(self, wish: Any) -> None:
        self.wishes.append(wish)

    def recv(self) -> Any:
        wish = self.wishes[-1]
        if isinstance(wish, Case):
            return Watched(self.rates.pop(0), 3.0, sent=wish.first)
        if isinstance(wish, Ask):
            return []
        if wish.function is engine_probe.host_times:
            return {"steps": 9, "host": self.host}
        if wish.function is step_pace.paces:
            return {}
        return None

    def of(self, kind: type[Any]) -> list[Any]:
        return [wish for wish in self.wishes if isinstance(wish, kind)]


def test_chains_alone_are_told_a_length() -> None:
    names = ["chain", "ours", "block:3,5", "ngram:15", "tree:15"]
    pipes: Any = {name: Pipe() for name in names}
    assert contest.Bars(pipes, 24, None).chains == ["chain", "block:3,5"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], ["windows", "device False", "steps 0"]),
        (["--device", "first"], ["device False", "windows", "steps 0"]),
        (
            ["--device", "first", "--kernels", "--timeline", "3"],
            ["device False", "windows", "device True", "steps 3"],
        ),
        (["--device", "off", "--timeline", "1"], ["windows", "steps 1"]),
    ],
)
def test_nothing_is_profiled_before_the_windows(
    given: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Recorder(contest.Bars):
        def measure(self, *args: Any) -> None:
            done.append("windows")

        def measure_device(self, with_kernels: bool) -> None:
            done.append(f"device {with_kernels}")

        def measure_steps(self, cells: Sequence[Cell]) -> None:
            done.append(f"steps {len(cells)}")

        def close(self) -> None:
            done.append("end")

    def start(arguments: Any) -> contest.Bars:
        arguments.cells = [Cell(1.0, 1, 5, 14)] * 5
        pipes: Any = {"chain": Pipe(), "ours": Pipe()}
        return Recorder(pipes, 256, None)

    monkeypatch.setattr(contest, "start", start)
    assert program.main(["pair", *given]) == 0
    assert done == [*expected, "end"]


def test_large_batches_come_last() -> None:
    chain, ours = Pipe(*[100] * 4), Pipe(*[110] * 4)
    found = bars(chain, ours)
    found.measure([Cell(1.0, 64, 3, 96), Cell(1.0, 16, 5, 64)], 2, math.inf)
    batches = [(window.cell.batch, window.number) for window in found.windows]
    assert batches == [(16, 0), (16, 1), (64, 0), (64, 1)]


def bars(chain: Pipe, ours: Pipe, file: str | None = None) -> contest.Bars:
    pipes: Any = {"chain": chain, "ours": ours}
    return contest.Bars(pipes, 256, file)


def test_other_engines_take_their_turn() -> None:
    chain, ours, fp8, tree = Pipe(100, 100), Pipe(120, 130), Pipe(105, 104), Pipe(125, 125)
    pipes: Any = {"chain": chain, "ours": ours, "sampled:3,5+fp8": fp8, "auto:63": tree}
    found = contest.Bars(pipes, 256, None)
    found.measure([Cell(0.6, 4, 5, 40)], 2, math.inf)
    # A chain is told its drafts, a tree chooses; all have the same prompts.
    assert fp8.of(Case) == chain.of(Case)
    assert tree.of(Case) == ours.of(Case)
    assert fp8.of(Ask) == [replace(ask, case=replace(ask.case, drafts=5)) for ask in tree.of(Ask)]
    assert [window.over("sampled:3,5+fp8") for window in found.windows] == [120 / 105, 130 / 104]
    head, _, row = windows.table(found.windows).splitlines()
    assert head.endswith("| ours / sampled:3,5+fp8 | ours / auto:63 | ours / stock's best |")
    assert row.endswith("| 1.196 | 1.000 | 1.196 |")
    # Stock's best is the one that is the fastest, not the one that is told first.
    assert [window.over_best for window in found.windows] == [120 / 105, 130 / 104]
    assert "; sampled:3,5+fp8 105 (3.00), 1.143; auto:63 125 (3.00), 0.960" in str(found.windows[0])


def test_both_engines_are_sent_the_same(tmp_path: Path) -> None:
    chain, ours = Pipe(100, 200, 110, 210), Pipe(120, 230, 143, 220, host=1100.0)
    cells = [Cell(0.6, 1, 5, 14), Cell(0.0, 4, 7, 40)]
    found = bars(chain, ours, str(tmp_path / "bars.json"))
    found.measure(cells, 2, math.inf)
    # Stock's engine alone is told how many drafts; the second round has other prompts.
    cases = [Case(0.6, 1, 14, 256), Case(0.0, 4, 40, 256)]
    assert ours.of(Case) == [*cases, *(replace(each, first=each.requests) for each in cases)]
    told = [(case.temperature, case.first, case.drafts) for case in chain.of(Case)]
    assert told == [(0.6, 0, 5), (0.0, 0, 7), (0.6, 14, 5), (0.0, 40, 7)]
    # The host is timed around each window, and each batch is warmed up once.
    calls = [wish.arguments for wish in ours.of(Call) if wish.function is engine_probe.watch_host]
    assert calls == [(1,), (4,), (1,), (4,)]
    assert ours.of(Ask) == [
        Ask(Case(0.6, 1, 2, 16), margins=False), Ask(Case(0.0, 4, 6, 16), margins=False),
    ]  # fmt: skip
    assert [ask.case.drafts for ask in chain.of(Ask)] == [5, 7]
    assert [window.ratio for window in found.windows] == [1.2, 1.15, 1.3, 220 / 210]
    *_, first, second = windows.table(found.windows).splitlines()
    assert first == (
        "| 1 | 0.6 | 2 | 105 (chain of 5) | 3.00 | 132 | 3.00 | 1.250 | 1.25 | yes | 1.10 |"
    )
    assert second.startswith("| 4 | 0 | 2 | 205 (chain of 7) |")
    assert second.endswith("| 1.03 | yes | 1.10 |")
    written = json.loads((tmp_path / "bars.json").read_text())
    assert written["table"] == windows.table(found.windows)
    assert [window["ratio"] for window in written["windows"]] == [
        window.ratio for window in found.windows
    ]


def test_a_window_whose_drafts_are_all_rejected_is_void() -> None:
    def window(length: float, seconds: float, ratio: float) -> Window:
        chain = Side(1000.0, length, 0, {}, seconds)
        ours = Side(1000.0 * ratio, 2.2, 0, {}, seconds)
        return Window(Cell(1.0, 64, 3, 192), 0, chain, ours, ratio)

    good, broken, short = window(2.3, 5.0, 1.06), window(1.0, 5.0, 1.93), window(1.0, 0.1, 1.06)
    assert [each.void for each in (good, broken, short)] == [False, True, False]
    assert ["VOID" in str(each) for each in (good, broken, short)] == [False, True, False]
    assert windows.table([good, broken]) == windows.table([good])


def test_steps_and_the_bandwidth_that_they_use() -> None:
    # 16 GB of weights and 4,000 tokens of 1 MB at 4 TB/s are 5 ms.
    needed = step_bytes.StepBytes(15 * 10**9, 10**9, 1e6, 4e12)
    assert needed.use(0.010, 4000) == pytest.approx(0.5)
    assert step_bytes.StepBytes(1, 1, 1.0, 0.0).use(0.010, 4000) is None
    sides = [Side(1000.0, 2.0, 0, {}, 5.0, {}, {}, 8.0, 8.0, use) for use in (0.5, 0.7, None)]
    cell = Cell(0.0, 4, 5, 40)
    two = [Window(cell, 0, sides[0], sides[2], 1.0), Window(cell, 1, sides[1], sides[2], 1.0)]
    row = windows.step_table(two).splitlines()[-1]
    assert row == "| 4 | 0 | 8.00 ms, 8.0, 60% | 8.00 ms, 8.0, - |"


def test_engines_start_from_the_arguments() -> None:
    """The arguments have what the start of an engine reads; `--options` go to each engine."""
    given = ["pair", "--options", '{"seed": 7}', "--fp8-target", "--sizes", "1", "2"]
    arguments = program.read_arguments(given)
    arguments.requests_in_flight = [4]
    found = engine_options(read_arm("none", Path("draft"), 2, 2, 4), arguments)
    assert (found["seed"], found["max_num_seqs"], found["kv_cache_dtype"]) == (7, 4, "fp8")
    assert found["compilation_config"] == {"cudagraph_capture_sizes": [1, 2]}


def model(tokens: int, **more: torch.nn.Module) -> Any:
    """A model whose output head has so many tokens of 100."""
    inner = torch.nn.ModuleDict(
        {
            "embed_tokens": torch.nn.Embedding(100, 8),
            "down_proj": torch.nn.Linear(16, 8, bias=False),
        }
    )
    inner.update(more)
    return torch.nn.ModuleDict({"model": inner, "lm_head": torch.nn.Linear(8, tokens, bias=False)})


def test_weights_of_a_target_count_once() -> None:
    target = model(100)
    assert step_bytes.target_bytes(target) == 4 * (16 * 8 + 8 * 100)
    target["lm_head"].weight = target["model"]["embed_tokens"].weight
    assert step_bytes.target_bytes(target) == 4 * (16 * 8 + 8 * 100)


def test_what_the_tuner_chose() -> None:
    """The watch sums up by nodes, and the tuner still gets what it is told."""
    tuner, direct = (NodeTuner([0, 1, 3, 7], 64, [1, 2], {1: 1, 3: 3, 7: 7}) for _ in range(2))
    watch = node_counts.Watch(tuner)
    tuner.observe(3, [4, 2], 0.010, batch=2)
    tuner.observe(7, [6, 8], None, batch=2)
    tuner.observe(3, [1], 0.030, batch=2, prompts=True)
    assert watch.end() is tuner
    tuner.observe(1, [1], 0.5, batch=1)
    direct.observe(3, [4, 2], 0.010, batch=2)
    direct.observe(7, [6, 8], None, batch=2)
    direct.observe(3, [1], 0.030, batch=2, prompts=True)
    direct.observe(1, [1], 0.5, batch=1)
    assert tuner._acceptance._seen == direct._acceptance._seen
    assert tuner._acceptance._seen[3].missed > tuner._acceptance._seen[1].missed > 0
    found = node_counts.summary(watch.steps)
    assert found == {
        3: {"share": 0.667, "length": 2.333, "prompts": 0.5, "ms": 10.0, "ms_prompts": 30.0},
        7: {"share": 0.333, "length": 7.0, "prompts": 0.0},
    }
    assert node_counts.line(found) == "nodes 3 67 % 2.33 in 10.0 ms, 7 33 % 7.00"
    assert node_counts.line({}) == ""
    assert node_counts.nodes_used(None, 2) == {}

    class Core:
        """The engine core, which calls the functions in its worker."""

        scheduler = SimpleNamespace(dynamic_sd_lookup=SimpleNamespace(tuner=tuner))
        llm_engine = None

        def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
            return [function(None, *args)]

    loop = WatchedLoop(Core(), ["text"])
    loop(Call(node_counts.watch_nodes))
    tuner.observe(3, [4, 2], 0.010, batch=2)
    assert loop(Call(node_counts.nodes_used, (2,)))[3]["share"] == 1


class Core:
    """Make an engine core with a scheduler that is told steps of `counts` rows and drafts."""

    def __init__(self) -> None:
        self.scheduler = self
        self.told: list[int] = []

    def update_from_output(self, scheduled: Any, output: Any) -> int:
        self.told.append(scheduled.total_num_scheduled_tokens)
        return len(self.told)

    def step(self, counts: dict[str, tuple[int, int]], tokens: list[list[int]], new: int) -> int:
        scheduled = SimpleNamespace(
            scheduled_new_reqs=[None] * new,
            num_scheduled_tokens={name: rows for name, (rows, _) in counts.items()},
            scheduled_spec_decode_tokens={
                name: [0] * drafts for name, (_, drafts) in counts.items() if drafts
            },
            total_num_scheduled_tokens=sum(rows for rows, _ in counts.values()),
        )
        return self.scheduler.update_from_output(
            scheduled, SimpleNamespace(sampled_token_ids=tokens)
        )

    def begin(self, batch: int) -> None:
        step_pace.watch_pace(None, batch)


def test_the_pace_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of each kind are summed up, and the scheduler is still told."""
    core = Core()
    clock = iter([1.0, 1.5, 1.75, 2.0, 2.125, 2.25, 2.5, 3.0, 3.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    core.begin(2)
    assert core.step({"a": (50, 0)}, [[1]], new=1) == 1
    core.step({"a": (4, 3), "b": (4, 3)}, [[1, 2], [3]], new=0)
    core.step({"a": (4, 3), "b": (1, 0)}, [[1], [2]], new=0)
    core.step({"a": (4, 3)}, [[1, 2, 3]], new=0)
    core.step({}, [], new=0)
    core.step({"a": (4, 3), "b": (20, 0)}, [[1], []], new=0)
    core.step({"a": (1, 0), "b": (1, 0)}, [[1], [2]], new=0)
    core.step({"a": (4, 3), "b": (4, 3)}, [[1], [2]], new=0)
    found = step_pace.paces(None)
    assert core.step({"a": (9, 0)}, [[]], new=0) == 9
    assert core.told == [50, 8, 5, 4, 0, 24, 2, 8, 9]
    assert found == {
        "full": {
            "steps": 2, "time": 0.235, "ms": 250.0, "mean_ms": 250.0, "rows": 6.5, "tokens": 2.5,
        },
        "bare": {
            "steps": 1, "time": 0.235, "ms": 500.0, "mean_ms": 500.0, "rows": 2.0, "tokens": 2.0,
        },
        "turn": {
            "steps": 1, "time": 0.118, "ms": 250.0, "mean_ms": 250.0, "rows": 8.0, "tokens": 2.0,
        },
        "prompts": {
            "steps": 2, "time": 0.353, "ms": 375.0, "mean_ms": 375.0, "rows": 37.0, "tokens": 1.0,
        },
        "fewer": {
            "steps": 1, "time": 0.059, "ms": 125.0, "mean_ms": 125.0, "rows": 4.0, "tokens": 3.0,
        },
    }  # fmt: skip
    told = "full 2 steps 24 % 250.00 ms (250.00) 6 rows 2.5 tokens, bare"
    assert step_pace.line(found).startswith(told)
    assert step_pace.line({}) == ""


def test_no_pace_without_a_scheduler() -> None:
    step_pace.watch_pace(None, 4)
    assert step_pace.paces(None) == {}


def test_windows_that_do_not_fit_are_left_out() -> None:
    now = 0.0

    class Slow(Pipe):
        def recv(self) -> Any:
            nonlocal now
            now += 10.0 if isinstance(self.wishes[-1], Case) else 0.0
            return super().recv()

    chain, ours = Slow(*[1.0] * 9), Slow(*[1.0] * 9)
    found = bars(chain, ours)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contest, "time", SimpleNamespace(perf_counter=lambda: now))
        # 20 seconds a window: the fourth would not end in time.
        found.measure([Cell(1.0, 1, 5, 14), Cell(1.0, 4, 5, 40)], 4, 75.0)
    assert [window.cell.batch for window in found.windows] == [1, 4, 1]
    assert now == 60.0


def test_default_cells_have_bars() -> None:
    cells = windows.read_cells(windows.DEFAULT_CELLS, (3, 5, 7), 128)
    assert len(set(cells)) == 15
    assert [(cell.batch, cell.temperature) for cell in cells[:4]] == [
        (1, 0.6), (4, 0.6), (4, 1.0), (16, 0.0),
    ]  # fmt: skip
    expected = {1: [1.12, 1.25, 1.25], 4: [1.03, 1.15, 1.15], 16: [1.03, 1.15, 1.15]}
    for batch in (1, 4, 16, 64, 128):
        of_batch = sorted((cell.temperature, cell.bar) for cell in cells if cell.batch == batch)
        assert [bar for _, bar in of_batch] == expected.get(batch, [0.99] * 3)


@pytest.mark.parametrize("text", ["[[0, 1, 5]]", "nothing", "[[0, 1, 4, 9]]", "[[0, 9, 5, 99]]"])
def test_cells_that_cannot_be_run(text: str) -> None:
    with pytest.raises(BenchmarkError, match="--cells"):
        windows.read_cells(text, (3, 5, 7), 8)


def test_a_window_without_steps_to_time_has_no_host_ratio() -> None:
    chain = Side(100.0, 3.0, 7, {"steps": 0}, 1.5)
    ours = Side(100.0, 3.0, 7, {"steps": 5, "host": 900.0}, 1.5)
    window = Window(Cell(0.0, 2, 5, 6), 0, chain, ours, ratio=1.0)
    assert window.host_ratio is None
    assert "host - / 0.90 ms, -;" in str(window)


def test_device_lines_judge_by_their_bars() -> None:
    levels = {
        "passes": 6, "greedy_ms": 1.4, "sampled_ms": 1.42, "bytes_a_pass": 749e6,
        "copy_gb_per_s": 4248.0, "floor_ms": 1.058, "ratio": 1.342, "kernels": [],
    }  # fmt: skip
    times = {"ms": 4.9, "one_row_ms": 4.5, "ratio": 1.0889}
    rows = {"rows": 32, "context": 2000, "kernels": [], **times}
    first, second = windows.device_lines({"3": levels, "4": rows})
    assert first.endswith("1.342 (bar 1.35: met)")
    assert second.endswith("1.089 (bar 1.06: not met)")
    assert windows.device_lines({})[0] == "bar 3: skipped: not asked for"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run an engine of trees of 3 nodes in recorded graphs, whose times mean nothing."""
    monkeypatch.setattr(engine_probe, "PASSES", 1)
    for name, value in {"PASSES": 1, "REPLAYS": 1, "COPY_BYTES": 1 << 20}.items():
        monkeypatch.setattr(step_bytes, name, value)
    with Pair.load(SHIPPED).engine(
        nodes=3,
        topk=2,
        steps=2,
        ranges=[(1, 1, 0), (2, 2, 3)],
        tree={"shape": "auto"},
        max_num_seqs=2,
        attention="triton",
        graphs=[1, 2, 4, 8],
        # `bench trees` also sets this: then no request owns the blocks of requests that ended.
        enable_prefix_caching=False,
    ) as llm:
        yield llm


def hidden(runner: Any, context: int) -> torch.Tensor:
    """Replay the graph of one request of four rows, and return its output."""
    graphs = runner.cudagraph_manager
    (desc,) = (desc for desc in graphs.graphs if (desc.num_reqs, desc.num_tokens) == (1, 4))
    engine_probe.pretend_request(runner, 4, context)
    output = graphs.run_fullgraph(desc)
    return (output[0] if isinstance(output, tuple) else output).clone()


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_replays_are_those_of_one_request_with_its_context(recorded: Any) -> None:
    from vllm_graft.testing.engine import model_runner

    requests = [Request(Pair.load(SHIPPED).prompts[0], {"temperature": 0, "max_tokens": 6})]
    expected = answer_all(recorded, requests)
    runner = model_runner(recorded)
    worker, context = SimpleNamespace(model_runner=runner), 40
    before = [cache.clone() for cache in runner.kv_caches]
    levels = engine_probe.draft_levels(worker, nodes=3, context=context)
    assert (levels["passes"], levels["topk"], levels["steps"]) == (1, 2, 2)
    longest = max(levels["greedy_ms"], levels["sampled_ms"])
    # Both were seconds before, which rounds the last digit otherwise.
    assert levels["ratio"] == pytest.approx(longest / levels["floor_ms"])
    assert all(torch.equal(a, b) for a, b in zip(before, runner.kv_caches, strict=True))
    rows = engine_probe.target_rows(worker, rows=4, context=context)
    assert rows["ratio"] == pytest.approx(rows["ms"] / rows["one_row_ms"])
    assert rows["ratio"] > 0
    # The rows' K/V lies after the context, in the second block of 32, in all caches of the target.
    written = [
        (a != b).any(dim=(1, 3)).nonzero().tolist() for a, b in zip(before, runner.kv_caches)
    ]
    places = [[1, context - 32 + row] for row in range(4)]
    assert [each for each in written if each] == [places] * (len(written) - 1)

    with torch.inference_mode():
        found = hidden(runner, context)
        for cache in runner.kv_caches:
            cache[1, :, context - 32 + 4 :] = 9.0
        assert torch.equal(hidden(runner, context), found), "keys behind the rows are not read"
        for cache in runner.kv_caches:
            cache[1, :, context - 32 - 1] = 9.0
        assert not torch.equal(hidden(runner, context), found), (
            "the last key of the context is read"
        )
    with pytest.raises(LookupError, match=r"\[7\] rows"):
        engine_probe.target_rows(worker, rows=7, context=context)
    with pytest.raises(LookupError, match="63 nodes"):
        engine_probe.draft_levels(worker)
    del runner, worker
    assert answer_all(recorded, requests) == expected


def test_bytes_of_a_pass_leave_out_what_it_does_not_read() -> None:
    draft = model(50, fc=torch.nn.Linear(24, 8, bias=False))
    places = torch.nn.Parameter(torch.zeros(50, dtype=torch.long), requires_grad=False)
    draft.register_parameter("draft_id_to_target_id", places)
    assert step_bytes.draft_bytes(draft) == 4 * (16 * 8 + 8 * 50)
    head = Fp8Head(torch.randn(50, 8))
    assert step_bytes.draft_bytes(draft, head) == 4 * 16 * 8 + (8 + 4) * 50


def test_windows_do_without_the_hosts_time(capsys: pytest.CaptureFixture[str]) -> None:
    # Nobody calls from an engine core here.
    engine_probe.watch_host(None, 4)
    assert "not taken" in capsys.readouterr().out
    assert engine_probe.host_times(None) == {"steps": 0}
