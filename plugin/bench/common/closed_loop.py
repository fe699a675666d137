"""A closed loop of requests: the same number is in flight at any time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.arm_processes import CannotAnswer
from vllm_graft.bench.common.told_lengths import DRAFTS


@dataclass(frozen=True)
class Case:
    """The load of one measurement.

    Attributes:
        batch: requests in flight.
        requests: requests in all, at least `batch`.
        max_tokens: tokens of each answer; the first ones have fewer, so as not to end together.
        drafts: drafts of every step, with a `told_scheduler`; None: the engine decides.
        first: number of the first request; numbers determine prompts and seeds.
    """

    temperature: float
    batch: int
    requests: int
    max_tokens: int
    drafts: int | None = None
    first: int = 0


@dataclass(frozen=True)
class Ask:
    """A request for all answers of a case; with margins the engine also computes logprobs."""

    case: Case
    margins: bool


@dataclass(frozen=True)
class Measured:
    """Tokens per second, and the mean acceptance length (with the bonus token; 1 without drafts).
    `step` is the mean time of one in seconds, 0 where it is unknown."""

    rate: float
    acceptance: float
    step: float = field(default=0.0, compare=False)

    @property
    def figures(self) -> dict[str, float | None]:
        """Figures of a row by name, None where one is unknown."""
        return {
            "tokens_per_second": self.rate,
            "acceptance_length": self.acceptance,
            "step_ms": self.step * 1e3 or None,
            "tokens_per_step": self.rate * self.step or None,
        }


class TooFewRequests(CannotAnswer):
    """A case's requests are too few or too short, or the K/V cache does not hold the batch."""


class ClosedLoop:
    """Sends prompts, in turn, to a ``vllm.LLM`` that logs statistics; counts what comes back. Each
    is a `Request`, or its prompt alone."""

    def __init__(self, llm: Any, prompts: Sequence[Any]) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self._prompts = [each if isinstance(each, Request) else Request(each) for each in prompts]
        self._waiting = Waiting(())
        self._live: dict[str, Request] = {}
        self._emitted: dict[str, int] = {}
        self._sent = 0

    def __call__(self, wish: Case | Ask) -> Any:
        return self.answers(wish) if isinstance(wish, Ask) else self.measure(wish)

    def measure(self, case: Case) -> Measured:
        """Run one case; time it from when all requests decode until one ends and none follows."""
        self._waiting = Waiting(self._requests(case))
        follows = self._follow(case.batch)
        while follows and not all(self._emitted.values()):
            follows = self._follow(self._step()[1])
        if not follows:
            self._stop()
            raise TooFewRequests(
                f"{case.requests} requests of {case.max_tokens} tokens came to their end "
                f"before {case.batch} of them decoded at a time: have more, or longer ones, "
                "more sessions, or a K/V cache that holds so many"
            )
        measured = self._window()
        self._stop()
        return measured

    def _window(self) -> Measured:
        from vllm_graft.testing import spec_metrics

        before, began, tokens, steps = spec_metrics(self._llm), time.perf_counter(), 0, 0
        while True:
            emitted, ended = self._step()
            tokens += emitted
            # A call that returns before the device's step is through emits nothing.
            steps += emitted > 0
            if not self._follow(ended):
                break
        seconds, after = time.perf_counter() - began, spec_metrics(self._llm)
        drafts = after.drafts - before.drafts
        accepted = after.accepted_tokens - before.accepted_tokens
        acceptance = 1 + accepted / drafts if drafts else 1.0
        return Measured(tokens / seconds, acceptance, seconds / max(1, steps))

    def answers(self, ask: Ask) -> list[Answer]:
        self._waiting = Waiting(self._requests(ask.case))
        live: dict[str, Any] = {}
        found: dict[int, Answer] = {}
        while len(found) < ask.case.requests:
            while len(live) < ask.case.batch and (taken := self._waiting.take()) is not None:
                taken[1].logprobs = 2 if ask.margins else None
                self._send(*taken)
                live[str(self._sent)] = taken[1].seed
            for output in self._engine.step():
                if output.finished and output.request_id in live:
                    self._waiting.end(self._live.pop(output.request_id))
                    found[live.pop(output.request_id)] = Answer.of(output.outputs[0])
        self._emitted.clear()
        return [found[number] for number in sorted(found)]

    def _requests(self, case: Case) -> Iterator[tuple[Request, Any]]:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        for place in range(case.requests):
            share = 1.0 if place >= case.batch else 0.3 + 0.7 * (place + 1) / case.batch
            number = case.first + place
            request = self._prompts[number % len(self._prompts)]
            told = request.body(max(2, round(share * case.max_tokens)))
            bound = told.pop("structured_outputs", None)
            more = told.pop("vllm_xargs", None) or {}
            if case.drafts is not None:
                more = {**more, DRAFTS: case.drafts}
            params = SamplingParams(
                temperature=(
                    case.temperature if request.temperature is None else request.temperature
                ),
                # With one seed, all arms that draw with the target's noise give the same text.
                seed=number,
                structured_outputs=StructuredOutputsParams(**bound) if bound else None,
                extra_args=more or None,
                **told,
            )
            yield request, params

    def _follow(self, ended: int) -> bool:
        """Send a request for each that has ended; False if there are too few."""
        for _ in range(ended):
            if (taken := self._waiting.take()) is None:
                return False
            self._send(*taken)
        return True

    def _send(self, request: Request, params: Any) -> None:
        self._sent += 1
        self._live[str(self._sent)] = request
        self._emitted[str(self._sent)] = 0
        self._engine.add_request(str(self._sent), request.prompt, params)

    def _step(self) -> tuple[int, int]:
        """Run a step; return how many tokens came and how many requests ended."""
        tokens = ended = 0
        for output in self._outputs():
            name = output.request_id
            if name not in self._emitted:
                continue
            found = len(output.outputs[0].token_ids)
            tokens += found - self._emitted[name]
            self._emitted[name] = found
            if output.finished:
                del self._emitted[name]
                self._waiting.end(self._live.pop(name))
                ended += 1
        return tokens, ended

    def _outputs(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        return outputs

    def _stop(self) -> None:
        self._engine.abort_request(list(self._emitted))
        self._emitted.clear()
        self._live.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


@dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
        prompt: a text, or token ids and a salt, as ``vllm.LLM`` takes it.
        max_tokens: tokens of the answer at most, if the case allows more.
        session: a name. Requests of one session follow each other.
        schema: the JSON schema that the answer is bound to.
        prediction: what the answer will probably be.
        temperature: None for that of the case.
    """

    prompt: Any
    max_tokens: int | None = None
    session: str | None = None
    schema: Mapping[str, Any] | None = None
    prediction: str | None = None
    temperature: float | None = None

    def body(self, limit: int) -> dict[str, Any]:
        """What the API's body says of the answer, which has `limit` tokens at most. It has all of
        them, unless a schema says where it ends."""
        most = min(limit, self.max_tokens or limit)
        said: dict[str, Any] = {"max_tokens": most, "ignore_eos": not self.schema}
        if self.schema:
            said["structured_outputs"] = {"json": self.schema}
        if self.prediction:
            said["vllm_xargs"] = {"graft_prediction": self.prediction}
        return said


class Waiting:
    """Requests that are not sent yet, each with what belongs to it."""

    def __init__(self, requests: Iterable[tuple[Request, Any]]) -> None:
        self._left = list(requests)
        self._busy: set[str | None] = set()

    def take(self) -> tuple[Request, Any] | None:
        """The first one whose session has no request in flight; None if there is none."""
        for place, (request, _) in enumerate(self._left):
            if request.session not in self._busy:
                self._busy |= {request.session} - {None}
                return self._left.pop(place)
        return None

    def end(self, request: Request) -> None:
        self._busy.discard(request.session)
