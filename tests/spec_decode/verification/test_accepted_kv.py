"""What a connector is told of tokens, and when it gets layers, beside any schedule of drafts."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import forward_context

from vllm_graft.spec_decode.verification.accepted_kv import (
    AcceptedTokens,
    LayerSaves,
    count_accepted,
)

NODES = 7


class Schedule:
    """A scheduler of one request, as vLLM counts: drafts first, what was rejected later.

    `ahead` steps are in flight when a step is scheduled.
    """

    def __init__(self, numbers: random.Random, prompt: int, ahead: int) -> None:
        self.numbers, self.ahead, self.prompt = numbers, ahead, prompt
        self.request: Any = SimpleNamespace(
            request_id="a", num_computed_tokens=0, num_tokens=prompt, num_output_tokens=0
        )
        self.flights: list[int] = []
        self.steps = 0

    def step(self, chunk: int) -> Any:
        """Return a step's output, with a part of the prompt or a tree."""
        rest = self.prompt - self.request.num_computed_tokens
        nodes = NODES if rest <= 0 else 0
        rows = min(rest, chunk) if rest > 0 else 1 + nodes
        cached = SimpleNamespace(
            req_ids=["a"] if self.steps else [],
            resumed_req_ids=set(),
            num_computed_tokens=[self.request.num_computed_tokens] if self.steps else [],
        )
        self.steps += 1
        return SimpleNamespace(
            scheduled_new_reqs=[] if cached.req_ids else [SimpleNamespace(req_id="a")],
            scheduled_cached_reqs=cached,
            finished_req_ids=set(),
            num_scheduled_tokens={"a": rows},
            total_num_scheduled_tokens=rows,
            scheduled_spec_decode_tokens={"a": [5] * nodes} if nodes else {},
        )

    def then(self, output: Any) -> None:
        """Count a step as computed, and take in the one that is due."""
        rows = output.num_scheduled_tokens["a"]
        before = self.request.num_computed_tokens
        self.request.num_computed_tokens = before + rows
        tree = bool(output.scheduled_spec_decode_tokens)
        self.flights.append(NODES if tree else -1 if before + rows < self.prompt else 0)
        if len(self.flights) > self.ahead:
            nodes = self.flights.pop(0)
            if nodes < 0:
                return
            accepted = self.numbers.randrange(nodes + 1)
            self.request.num_computed_tokens -= nodes - accepted
            self.request.num_tokens += accepted + 1
            self.request.num_output_tokens += accepted + 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_every_known_token_is_told_once(seed: int, ahead: int) -> None:
    numbers = random.Random(seed)
    schedule = Schedule(numbers, numbers.randrange(1, 40), ahead)
    tokens = AcceptedTokens({"a": schedule.request})
    told = over = 0
    for _ in range(60):
        output = schedule.step(chunk=numbers.randrange(1, 20))
        view, starts = tokens.of_step(output)
        assert starts == {"a": told}
        assert view.scheduled_cached_reqs.num_computed_tokens in ([], [told])
        assert not view.scheduled_spec_decode_tokens
        assert view.total_num_scheduled_tokens == output.num_scheduled_tokens["a"]
        told += view.num_scheduled_tokens["a"]
        known = schedule.request.num_tokens
        stock = schedule.request.num_computed_tokens + output.num_scheduled_tokens["a"]
        assert told == min(known, stock)
        over += stock > known
        schedule.then(output)
    # This negative control shows what vLLM says: tokens that nobody knows yet.
    assert over > 20


def test_a_request_that_begins_anew_is_told_from_its_start() -> None:
    request: Any = SimpleNamespace(num_computed_tokens=0, num_tokens=8)
    tokens = AcceptedTokens({"a": request})
    schedule = Schedule(random.Random(0), 8, 0)
    schedule.request = request
    tokens.of_step(schedule.step(chunk=8))
    request.num_computed_tokens, request.num_tokens = 4, 12
    resumed = schedule.step(chunk=8)
    resumed.scheduled_cached_reqs.resumed_req_ids = {"a"}
    view, starts = tokens.of_step(resumed)
    assert starts == {"a": 4}
    assert view.num_scheduled_tokens == {"a": 4}


class Scheduler:
    """What our hooks need of vLLM's."""

    def __init__(self, request: Any) -> None:
        self.connector: Any = object()
        self.requests = {request.request_id: request}
        self.seen: list[int] = []

    def _build_kv_connector_meta(self, connector: Any, output: Any) -> None:
        self.seen.append(self.requests["a"].num_computed_tokens)

    def _connector_finished(self, request: Any) -> None:
        self.seen.append(request.num_computed_tokens)
        raise RuntimeError("the connector's own")


@pytest.mark.parametrize(("output", "told"), [(0, 20), (3, 19)])
def test_an_ended_request_has_k_v_of_known_tokens(output: int, told: int) -> None:
    request: Any = SimpleNamespace(
        request_id="a", num_computed_tokens=24, num_tokens=20, num_output_tokens=output
    )
    scheduler: Any = Scheduler(request)
    count_accepted(scheduler)
    with pytest.raises(RuntimeError, match="own"):
        scheduler._connector_finished(request)
    assert scheduler.seen == [told]
    assert request.num_computed_tokens == 24  # As vLLM counts, whatever a connector does.


def test_a_scheduler_without_a_connector_stays_as_it_is() -> None:
    scheduler: Any = Scheduler(SimpleNamespace(request_id="a"))
    scheduler.connector = None
    count_accepted(scheduler)
    assert set(vars(scheduler)) == {"connector", "requests", "seen"}


def test_layers_wait_for_the_accepted_path_and_come_once() -> None:
    saves, seen = LayerSaves(), []

    def save(layer: str, *, cache: int) -> None:
        seen.append((layer, cache, forward_context.is_forward_context_available()))

    begin, ours = partial(saves.begin, lambda output: None), partial(saves.save, save)
    for drafts in ({"a": [5]}, {}):
        begin(SimpleNamespace(scheduled_spec_decode_tokens=drafts))
        with forward_context.override_forward_context(SimpleNamespace()):  # type: ignore[arg-type]
            ours("one", cache=1)
            ours("two", cache=2)
        assert len(seen) == (0 if drafts else 2)
        saves.release()
        assert seen == [("one", 1, True), ("two", 2, True)]
        # The draft's pass over accepted tokens, then those over levels.
        ours("draft", cache=3)
        ours("draft", cache=4)
        assert seen[2:] == [("draft", 3, False)]
        saves.release()
        assert len(seen) == 3
        seen.clear()
