"""A closed loop of requests: the same number is in flight at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
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
        drafts: drafts that every step has, where the engine has a `told_scheduler`; None lets the
            engine decide.
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

    `step` is the mean time of one in seconds, 0 where it is unknown.
    """

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
    """Sends prompts, in turn, to a ``vllm.LLM`` that logs statistics; counts what comes back.

    Prompts are texts, or have token ids, as ``vllm.LLM`` takes them.
    """

    def __init__(self, llm: Any, prompts: Sequence[Any]) -> None:
        self._llm, self._engine, self._prompts = llm, llm.llm_engine, prompts
        self._emitted: dict[str, int] = {}
        self._sent = 0

    def __call__(self, wish: Case | Ask) -> Any:
        return self.answers(wish) if isinstance(wish, Ask) else self.measure(wish)

    def measure(self, case: Case) -> Measured:
        """Run one case; time it from when all requests decode until one ends and none follows."""
        waiting = self._requests(case)
        for _ in range(case.batch):
            self._send(*next(waiting))
        while not all(self._emitted.values()):
            _, ended = self._step()
            if not self._follow(waiting, ended):
                self._stop()
                raise TooFewRequests(
                    f"{case.requests} requests of {case.max_tokens} tokens came to their end "
                    f"before {case.batch} of them decoded at a time: have more, or longer ones, "
                    "or a K/V cache that holds so many"
                )
        measured = self._window(waiting)
        self._stop()
        return measured

    def _window(self, waiting: Iterator[tuple[Any, Any]]) -> Measured:
        from vllm_graft.testing import spec_metrics

        before, began, tokens, steps = spec_metrics(self._llm), time.perf_counter(), 0, 0
        while True:
            emitted, ended = self._step()
            tokens += emitted
            # A call that returns before the device's step is through emits nothing.
            steps += emitted > 0
            if not self._follow(waiting, ended):
                break
        seconds, after = time.perf_counter() - began, spec_metrics(self._llm)
        drafts = after.drafts - before.drafts
        accepted = after.accepted_tokens - before.accepted_tokens
        acceptance = 1 + accepted / drafts if drafts else 1.0
        return Measured(tokens / seconds, acceptance, seconds / max(1, steps))

    def answers(self, ask: Ask) -> list[Answer]:
        """Answer one case's requests, in their order."""
        waiting = enumerate(self._requests(ask.case))
        live: dict[str, int] = {}
        found: dict[int, Answer] = {}
        while len(found) < ask.case.requests:
            for number, (prompt, params) in islice(waiting, ask.case.batch - len(live)):
                params.logprobs = 2 if ask.margins else None
                self._send(prompt, params)
                live[str(self._sent)] = number
            for output in self._engine.step():
                if output.finished and output.request_id in live:
                    found[live.pop(output.request_id)] = Answer.of(output.outputs[0])
        self._emitted.clear()
        return [found[number] for number in sorted(found)]

    def _requests(self, case: Case) -> Iterator[tuple[Any, Any]]:
        from vllm import SamplingParams

        for place in range(case.requests):
            share = 1.0 if place >= case.batch else 0.3 + 0.7 * (place + 1) / case.batch
            number = case.first + place
            params = SamplingParams(
                temperature=case.temperature,
                max_tokens=max(2, round(share * case.max_tokens)),
                ignore_eos=True,
                # With one seed, all arms that draw with the target's noise give the same text.
                seed=number,
                extra_args=None if case.drafts is None else {DRAFTS: case.drafts},
            )
            yield self._prompts[number % len(self._prompts)], params

    def _follow(self, waiting: Iterator[tuple[Any, Any]], ended: int) -> bool:
        """Send a request for each that has ended; False if there are too few."""
        following = list(islice(waiting, ended))
        for request in following:
            self._send(*request)
        return len(following) == ended

    def _send(self, prompt: Any, params: Any) -> None:
        self._sent += 1
        self._emitted[str(self._sent)] = 0
        self._engine.add_request(str(self._sent), prompt, params)

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
                ended += 1
        return tokens, ended

    def _outputs(self) -> list[Any]:
        outputs: list[Any] = self._engine.step()
        return outputs

    def _stop(self) -> None:
        self._engine.abort_request(list(self._emitted))
        self._emitted.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()
