"""The benchmark's own arithmetic; measurements themselves are made on a GPU, by hand."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname

from tests.support.engines.counting_engine import Clock, Engine, Llm, counters
from vllm_graft.bench.common import answers, arm_processes, closed_loop, told_lengths
from vllm_graft.bench.common.arm import Arm as NamedArm
from vllm_graft.bench.common.arm import Row, advice, panels, table
from vllm_graft.bench.common.closed_loop import Request
from vllm_graft.bench.common.report import BenchmarkError, TimeLimit
from vllm_graft.bench.trees import command
from vllm_graft.bench.trees.command import take_turns


class Arm:
    """A stand-in for an arm's process that answers with prepared rates."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)
        self.cases: list[closed_loop.Case] = []

    def send(self, case: closed_loop.Case) -> None:
        self.cases.append(case)

    def recv(self) -> closed_loop.Measured:
        return closed_loop.Measured(self.rates[len(self.cases) - 1], 2.5)


def turns(pipes: Any, rounds: int, temperature: float = 0.0, batch: int = 1) -> list[Row]:
    arguments = loads("--requests", "10", "--tokens", "64")
    arguments.rounds = rounds
    return take_turns(pipes, arguments, temperature=temperature, batch=batch)


def test_medians_leave_the_warm_up_out() -> None:
    none = NamedArm("none")
    pipes = {none: Arm(9999, 10, 30, 20), NamedArm("tree:31"): Arm(1, 50, 40, 45)}
    rows = turns(pipes, 3, temperature=1.0, batch=4)
    assert [(row.arm, row.main[1]) for row in rows] == [("none", 20), ("tree:31", 45)]
    assert rows[0].rounds == [10, 30, 20]
    # There are at least three times as many requests as the batch.
    assert pipes[none].cases[1] == closed_loop.Case(1.0, 4, 12, 64)


def test_an_arm_that_can_t_hold_a_case_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Small(Arm):
        def recv(self) -> Any:
            return super().recv() if self.cases[-1].batch < 4 else "24 requests came to their end"

    small = Small(1, 20, 30, 40)
    pipes = {NamedArm("none"): Arm(0, 10, 0, 20), NamedArm("tree:31"): small}
    rows = [row for batch in (1, 4) for row in turns(pipes, 1, batch=batch)]
    found = [(row.arm, row.case["requests_in_flight"]) for row in rows]
    assert found == [("none", 1), ("tree:31", 1), ("none", 4)]
    assert len(small.cases) == 3, "it is not asked again"
    assert "tree:31 is left out at 4 in flight: 24 requests" in capsys.readouterr().out
    assert table(rows, command.rate_cell).splitlines()[2].split()[:5] == [
        "0",
        "4",
        "20",
        "(2.50)",
        "-",
    ]


def test_chains_of_one_engine_take_turns() -> None:
    pipe = Arm(0, 0, 10, 20)
    rows = turns({NamedArm("sampled:3,5", drafts=(3, 5)): pipe}, 1)
    assert [(row.arm, row.main[1]) for row in rows] == [("sampled:3", 10), ("sampled:5", 20)]
    assert [case.drafts for case in pipe.cases] == [3, 5, 3, 5]


def loads(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_loads(parser)
    return parser.parse_args(["--requests-in-flight", "1", "4", "--rounds", "2", *options])


def test_rounds_ask_for_other_prompts() -> None:
    def asked(arguments: argparse.Namespace) -> list[range]:
        """Numbers of the requests that each round asks for."""
        pipe = Arm(*[1.0] * 6)
        command.measure_cases({NamedArm("graft"): pipe}, arguments)
        return [range(case.first, case.first + case.requests) for case in pipe.cases]

    again, other = asked(loads()), asked(loads("--new-prompts"))
    assert again == [range(2), range(12), range(12), range(6), range(12), range(12)]
    assert [len(numbers) for numbers in other] == [len(numbers) for numbers in again]
    assert [number for numbers in other for number in numbers] == list(range(56))
    # So many prompts are read.
    assert command.most_requests(loads()) == 12
    assert command.most_requests(loads("--new-prompts")) == 56


def test_no_load_begins_that_would_end_too_late(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = Arm(*[1.0] * 6)
    rows = command.measure_cases({NamedArm("graft"): pipe}, loads(), limit=TimeLimit(-1.0))
    assert len(rows) == 1
    assert len(pipe.cases) == 3
    assert "no time left for 1 of 2" in capsys.readouterr().err


class StockScheduler:
    """A scheduler as vLLM builds it, with its table and the requests that it took in."""

    def __init__(self, vllm_config: Any, **others: Any) -> None:
        self.dynamic_sd_lookup, self.taken = others["table"], list[Any]()

    def add_request(self, request: Any) -> None:
        self.taken.append(request)


def test_requests_tell_the_scheduler_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "vllm.v1.core.sched"
    monkeypatch.setattr(f"{path}.async_scheduler.AsyncScheduler", StockScheduler)
    monkeypatch.setattr(f"{path}.scheduler.Scheduler", None)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    build = resolve_obj_by_qualname(told_lengths.SCHEDULER)
    scheduler, engine, tables = build(config, table=[0, 7, 7, 3]), Engine(Clock()), []

    def take_in(name: str, prompt: str, params: Any) -> None:
        scheduler.add_request(SimpleNamespace(sampling_params=params))
        tables.append(list(scheduler.dynamic_sd_lookup))

    monkeypatch.setattr(engine, "add_request", take_in)
    loop = closed_loop.ClosedLoop(Llm(engine), ["a"])
    for drafts in (None, 5, 2):
        for prompt, params in loop._requests(closed_loop.Case(0.0, 1, 1, 8, drafts=drafts)):
            engine.add_request("0", prompt, params)
    assert tables == [[0, 7, 7, 3], [5, 5, 5, 5], [2, 2, 2, 2]]
    assert len(scheduler.taken) == 3
    with pytest.raises(BenchmarkError, match="an arm of its own"):
        build(config, table=None)


def test_the_loop_keeps_the_batch_full(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = Engine(clock)
    monkeypatch.setattr(closed_loop, "time", clock)

    monkeypatch.setattr("vllm_graft.testing.spec_metrics", counters)
    loop = closed_loop.ClosedLoop(Llm(engine), ["a", "b", "c"])
    measured = loop.measure(closed_loop.Case(0.0, 2, 6, 40))
    # Two requests emit two tokens each per tenth of a second.
    assert measured == closed_loop.Measured(pytest.approx(40.0), pytest.approx(2.0))
    assert measured.step == pytest.approx(0.1)
    assert set(engine.steps) == {2}
    assert engine.sent == [("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4), ("c", 5)]
    assert not engine.live
    # The next measurement has the same prompts and seeds.
    loop.measure(closed_loop.Case(0.0, 2, 6, 40))
    loop.measure(closed_loop.Case(0.0, 2, 6, 40))
    assert engine.sent[12:] == engine.sent[6:12] == engine.sent[:6]


def test_requests_of_a_session_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sessions are in flight; the third one follows the one that ends first."""
    clock = Clock()
    engine = Engine(clock)
    monkeypatch.setattr(closed_loop, "time", clock)
    monkeypatch.setattr("vllm_graft.testing.spec_metrics", counters)
    lengths = {"a": (4, 40), "b": (12, 4), "c": (40, 40)}
    said = [
        Request(f"{name}{turn}", most, name)
        for name, turns in lengths.items()
        for turn, most in enumerate(turns)
    ]
    loop = closed_loop.ClosedLoop(Llm(engine), said)
    loop.measure(closed_loop.Case(0.0, 2, 6, 99))
    assert [prompt for prompt, _ in engine.sent] == ["a0", "b0", "a1", "b1", "c0"]
    assert [seed for _, seed in engine.sent] == [0, 2, 1, 3, 4]
    found = loop.answers(closed_loop.Ask(closed_loop.Case(0.0, 2, 6, 99), margins=False))
    assert [len(each.tokens) for each in found] == [4, 40, 12, 4, 40, 40]


def test_sessions_are_as_many_as_requests_in_flight() -> None:
    arguments = loads("--requests", "1")
    arguments.turns = 5
    numbers = [case.requests for case in command.rounds(arguments, 0.0, 4)]
    assert numbers == [20, 20, 20]


def test_requests_that_end_too_soon_are_told() -> None:
    class Late(Engine):
        """An engine whose last request waits for the others to end."""

        def step(self) -> list[Any]:
            last = self.live.pop("4") if len(self.live) == 4 else None
            outputs = super().step()
            if last:
                self.live["4"] = last
            return outputs

    engine = Late(Clock())
    loop = closed_loop.ClosedLoop(Llm(engine), ["a"])
    with pytest.raises(
        closed_loop.TooFewRequests, match=r"5 requests of 8 tokens .* before 4 of them"
    ):
        loop.measure(closed_loop.Case(0.0, 4, 5, 8))
    assert not engine.live, "the next case finds the engine idle"


def test_other_requests_have_other_prompts_and_seeds() -> None:
    engine = Engine(Clock())
    loop = closed_loop.ClosedLoop(Llm(engine), ["a", "b", "c"])
    loop.answers(closed_loop.Ask(closed_loop.Case(0.0, 2, 3, 8, first=5), margins=False))
    assert engine.sent == [("c", 5), ("a", 6), ("b", 7)]


def test_answers_are_in_the_order_of_their_requests() -> None:
    engine = Engine(Clock())
    loop = closed_loop.ClosedLoop(Llm(engine), ["a", "b", "c"])
    ask = closed_loop.Ask(closed_loop.Case(0.0, 2, 5, 40), margins=False)
    # The first answers are shorter, so that they don't end together.
    assert [len(answer.tokens) for answer in loop.answers(ask)] == [26, 40, 40, 40, 40]
    assert [prompt for prompt, _ in engine.sent] == ["a", "b", "c", "a", "b"]
    # Two requests run at a time, until none follows.
    assert set(engine.steps[:40]) == {2}
    assert not engine.live


def test_margins_are_those_of_the_two_best() -> None:
    logprobs = [{5: -0.5, 7: -2.0}, {6: -1.0, 9: -1.25, 2: -4.0}]
    completion = SimpleNamespace(
        token_ids=[5, 9],
        logprobs=[
            {token: SimpleNamespace(logprob=value) for token, value in each.items()}
            for each in logprobs
        ],
    )
    assert answers.Answer.of(completion) == answers.Answer([5, 9], [1.5, 0.25])


def test_answers_that_differ_are_told_with_their_margins() -> None:
    def given(*tokens: list[int]) -> list[answers.Answer]:
        return [answers.Answer(each, []) for each in tokens]

    first = [answers.Answer([1, 2, 3], [0.5, 0.25, 4.0]), answers.Answer([7], [2.0])]
    same, other = given([1, 2, 3], [7]), given([1, 4, 3], [8])
    found = answers.compare({"none": first, "chain:5": same, "tree:31": other})
    assert [str(comparison) for comparison in found] == [
        "chain:5: 2 of 2 greedy answers are those of none",
        "tree:31: 0 of 2 greedy answers are those of none; the others leave it at "
        "token 1 (margin 0.25), token 0 (margin 2)",
    ]


def row(arm: str, rate: float, length: float, temperature: float = 0.0, batch: int = 1) -> Row:
    case = {"temperature": temperature, "batch": batch}
    return Row(arm, case, {"tokens_per_second": rate, "acceptance_length": length})


def test_table() -> None:
    rows = [row("none", 200.4, 1.0), row("chain:5", 550.0, 3.8)]
    assert table(rows, command.rate_cell).splitlines() == [
        "temperature  batch  none        chain:5     ours / best other",
        "0            1      200 (1.00)  550 (3.80)  -",
    ]
    rows.append(row("auto:63", 660.0, 5.1))
    assert table(rows, command.rate_cell).splitlines()[1].endswith("  660 (5.10)  1.20")


def test_panels() -> None:
    rows = [
        row(arm, 100.0 * batch, 2.0, temperature, batch)
        for arm in ("none", "tree:31")
        for temperature in (0.0, 1.0)
        for batch in (1, 4)
    ]
    rates, lengths, *rest = panels(rows, "batch", command.DRAWN)
    assert rates.series == {"none": [(1, 100), (4, 400)], "tree:31": [(1, 100), (4, 400)]}
    assert lengths.series["tree:31"] == [(1, 2.0), (4, 2.0)]
    assert [panel.title for panel in rest] == ["temperature 1"] * 2


def test_prompts_are_cached_only_where_options_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vllm_graft import testing

    seen: list[dict[str, Any]] = []

    @contextmanager
    def engine(target: Path, **options: Any) -> Iterator[str]:
        seen.append(options)
        yield "an engine"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(testing, "running", engine)
    monkeypatch.setattr(arm_processes, "as_a_server", contextlib.nullcontext)
    for given in ({}, {"enable_prefix_caching": True}):
        with arm_processes.running(Path("target"), dict(given)) as llm:
            assert llm == "an engine"
    assert [options["enable_prefix_caching"] for options in seen] == [False, True]


@pytest.mark.parametrize("together", [True, False])
def test_engines_that_do_not_fit_follow_each_other(
    together: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows are the same, and each engine has ended before the next one starts."""
    made = [NamedArm(name, commands={name: f"serve {name}"}) for name in ("none", "graft")]
    told: list[str] = []

    class Pipe:
        def __init__(self, arm: NamedArm) -> None:
            self.arm, self.wish = arm, None

        def send(self, wish: Any) -> None:
            self.wish = wish

        def recv(self) -> Any:
            if isinstance(self.wish, closed_loop.Ask):
                # The first arm alone computes margins.
                assert self.wish.margins is (self.arm is made[0])
                return [answers.Answer([1, 2], [1.0, 1.0])] * self.wish.case.requests
            return closed_loop.Measured(100.0 if self.arm is made[0] else 150.0, 2.0)

    def start(group: list[NamedArm], *_: Any) -> dict[NamedArm, Pipe]:
        told.append(f"start {len(group)}")
        return {arm: Pipe(arm) for arm in group}

    model = SimpleNamespace(max_model_len=64)
    config = SimpleNamespace(model_config=model)
    given = SimpleNamespace(model="model", config=config, tokenizer=None)
    monkeypatch.setattr(command.Serving, "read", lambda *_, **__: given)
    monkeypatch.setattr(command, "read_prompts", lambda *_: [Request({"prompt_token_ids": [1, 2]})])
    monkeypatch.setattr(command, "read_arms", lambda *_, **__: made)
    monkeypatch.setattr(
        command, "groups", lambda arms, _: [arms] if together else [[arm] for arm in arms]
    )
    monkeypatch.setattr(command.arm_processes, "start", start)
    monkeypatch.setattr(command.arm_processes, "stop", lambda _: told.append("stop"))
    arguments = loads("--answers", "4", "--tokens", "8")
    arguments.arms = arguments.seconds = None
    rows, commands = command.compare(arguments, ["model"])
    assert told == (["start 2", "stop"] if together else ["start 1", "stop"] * 2)
    found = sorted((row.arm, row.case["requests_in_flight"], row.main[1]) for row in rows)
    assert found == [("graft", 1, 150), ("graft", 4, 150), ("none", 1, 100), ("none", 4, 100)]
    assert table(rows, command.rate_cell).splitlines()[1].endswith("  1.50")
    assert "graft: 4 of 4 greedy answers are those of none" in capsys.readouterr().out
    assert advice(rows, commands).startswith("use this command: serve graft (1.50 x stock's best")
