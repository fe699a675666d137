"""Drafts that the scheduler keeps of each request, and what the tuner is told of such steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.spec_decode.tuning.test_scheduling import Told, make_scheduler, step
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.tuning.graph_fit import cut_trees
from vllm_graft.spec_decode.tuning.scheduling import StepWatch, tune
from vllm_graft.spec_decode.tuning.shared_drafts import SharedDrafts, verifies_share
from vllm_graft.spec_decode.tuning.shares import Share
from vllm_graft.spec_decode.tuning.step_times import PARTS

SHARE = Share(7, {"a": 7, "b": 1}, 3, 0.01, 9.0)


class Engine:
    """A scheduler's requests, whose drafts come with each step, as with async scheduling, or
    later."""

    def __init__(self, ahead: bool = True, max_rows: int = 64) -> None:
        self.requests = {
            name: SimpleNamespace(request_id=name, spec_token_ids=list[int]()) for name in "abc"
        }
        self.ahead = ahead
        self.tuner: Any = SimpleNamespace(share=None, knows=lambda nodes: True)
        scheduler: Any = SimpleNamespace(
            requests=self.requests,
            _update_after_schedule=self._placeholders,
            update_draft_token_ids=self._drafts,
        )
        self.scheduler, self.shares = scheduler, SharedDrafts(scheduler, self.tuner, max_rows)

    def _placeholders(self, output: Any) -> None:
        for name in output.num_scheduled_tokens if self.ahead else ():
            self.requests[name].spec_token_ids = [-1] * output.num_spec_tokens_to_schedule

    def _drafts(self, drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids):
            if name in self.requests:
                self.requests[name].spec_token_ids = tokens

    def step(self, share: Share | None, nodes: int = 7, names: str = "abc") -> Any:
        """Schedule a step that verifies what the requests have, and drafts by a share."""
        held = {name: len(self.requests[name].spec_token_ids) for name in names}
        output, self.tuner.share = step(held, nodes), share
        self.scheduler._update_after_schedule(output)
        if not self.ahead:
            tokens = [list(range(nodes)) for _ in names]
            drafts = SimpleNamespace(req_ids=[*names, "gone"], draft_token_ids=[*tokens, [1]])
            self.scheduler.update_draft_token_ids(drafts)
        return output

    def held(self) -> list[int]:
        return [len(each.spec_token_ids) for each in self.requests.values()]


@pytest.mark.parametrize("ahead", [True, False])
def test_each_request_keeps_its_first_drafts(ahead: bool) -> None:
    engine = Engine(ahead)
    first = engine.step(SHARE)
    assert engine.held() == [7, 1, 3]
    if not ahead:
        assert engine.requests["c"].spec_token_ids == [0, 1, 2]
    second = engine.step(None)
    assert engine.held() == [7, 7, 7]
    third = engine.step(SHARE, nodes=0)
    assert engine.held() == [0, 0, 0]
    assert [engine.shares.of(each) for each in (first, second, third)] == [
        (None, SHARE),
        (SHARE, None),
        (None, None),
    ]
    assert [verifies_share(each) for each in (first, second, third)] == [False, True, False]


def test_no_step_has_more_rows_than_a_graph() -> None:
    engine = Engine(max_rows=12)
    engine.step(SHARE)
    assert engine.held() == [3, 1, 3]


def test_only_the_latest_shares_are_remembered() -> None:
    engine = Engine()
    outputs = [engine.step(SHARE._replace(worth=float(number))) for number in range(40)]
    assert len(engine.shares._shares) == 16
    assert engine.shares.of(outputs[-1])[0] == SHARE._replace(worth=38.0)
    assert engine.shares.of(outputs[0]) == (None, None)
    # The same share again is no new one.
    engine.tuner.share = engine.shares.of(outputs[-1])[1]
    again = engine.step(engine.tuner.share)
    assert again.vllm_graft_shared == (40, 40)


def test_steps_of_shares_are_told() -> None:
    engine, told = Engine(), Told()
    watch = StepWatch(told, {}, shares=engine.shares)  # type: ignore[arg-type]
    outputs = [engine.step(SHARE) for _ in range(4)]
    beside = outputs[-1]
    beside.num_scheduled_tokens["p"] = 40
    for number, output in enumerate(outputs):
        sampled = {"a": [1] * 5, "b": [1, 2], "c": [1]}
        watch.ended(output, sampled if number else {"a": [1], "b": [1], "c": [1]}, 1.0 + number)
    names, widths = ["a", "b", "c"], [7, 1, 3]
    assert told.shares[0] == (names, (), None)
    assert told.shares[1:] == [(names, widths, SHARE)] * 3
    assert told.steps[1:] == [(7, [5, 2, 1], seconds) for seconds in (None, 1.0, 1.0)]
    assert told.besides[1:] == [(3, 0), (3, 0), (4, 40)]


def test_cut_shares_say_nothing() -> None:
    engine, told = Engine(), Told()
    watch = StepWatch(told, {}, shares=engine.shares)  # type: ignore[arg-type]
    engine.step(SHARE)
    output = engine.step(SHARE)
    output.num_scheduled_tokens["p"] = 40
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    cut_trees(output, 50)
    watch.ended(output, {"a": [1], "b": [1], "c": [1], "p": [1]}, 1.0)
    assert told.steps == []


def test_a_scheduler_shares_where_the_costs_of_parts_were_measured() -> None:
    scheduler = make_scheduler("auto", shares=True)
    scheduler.update_draft_token_ids = lambda drafts: None
    PARTS.keep(scheduler.vllm_config, {0: {64: 0.01}, 15: {2: 0.001}})
    tune(scheduler)
    assert scheduler.dynamic_sd_lookup.tuner.shares is not None
    assert hasattr(scheduler.update_draft_token_ids, "__wrapped__")
    assert PARTS.take(scheduler.vllm_config) is None


def test_shares_without_graphs_that_requests_share_are_an_error() -> None:
    with pytest.raises(ConfigError, match="shares is true, but the workers captured no graphs"):
        tune(make_scheduler("auto", shares=True))
    scheduler = make_scheduler("auto")
    tune(scheduler)
    assert scheduler.dynamic_sd_lookup.tuner.shares is None
