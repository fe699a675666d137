"""A closed loop of requests: the same number is in flight at any time."""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vllm_graft.bench.common.answers import Answer
from vllm_graft.bench.common.arm_processes import CannotAnswer

Nodes = dict[int, dict[str, float]]
"""Figures of each number of nodes, seen and expected."""


@dataclass(frozen=True)
class Case:
    """The load of one measurement.

    Attributes:
        batch: requests in flight.
        requests: requests in all, at least `batch`.
        max_tokens: tokens of each answer; the first ones have fewer, so as not to end together.
        drafts: drafts that every step has; None lets the engine decide.
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
class Call:
    """A request to call a function in the workers; its first argument is the worker."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Measured:
    """Tokens per second, and the mean acceptance length (with the bonus token; 1 without drafts).

    `sent` is a checksum of prompts, parameters and seeds. Means of steps, 0 where unknown, are
    `step` in seconds, and `held` tokens of the requests in flight with their prompts. `nodes` is
    what `watched` says.
    """

    rate: float
    acceptance: float
    sent: int = field(default=0, compare=False)
    step: float = field(default=0.0, compare=False)
    held: float = field(default=0.0, compare=False)
    nodes: Nodes = field(default_factory=dict, compare=False)

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
        self._prompt_tokens: dict[str, int] = {}
        self._sent = self._checksum = 0

    def __call__(self, wish: Case | Ask | Call) -> Any:
        if isinstance(wish, Call):
            return self._llm.collective_rpc(wish.function, args=wish.arguments)[0]
        return self.answers(wish) if isinstance(wish, Ask) else self.measure(wish)

    def measure(self, case: Case) -> Measured:
        """Run one case; time it from when all requests decode until one ends and none follows."""
        from vllm_graft.testing import spec_metrics

        if case.drafts is not None:
            self._llm.collective_rpc(fix_drafts, args=(case.drafts,))
        waiting, self._checksum = self._requests(case), 0
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
        self.watch()
        before, began, tokens = spec_metrics(self._llm), time.perf_counter(), 0
        steps = held = 0
        while True:
            emitted, ended = self._step()
            tokens += emitted
            # A call that returns before the device's step is through emits nothing.
            steps += emitted > 0
            held += self._held() if emitted else 0
            if not self._follow(waiting, ended):
                break
        seconds, after = time.perf_counter() - began, spec_metrics(self._llm)
        nodes = self.watched(case.batch)
        self._stop()
        drafts = after.drafts - before.drafts
        accepted = after.accepted_tokens - before.accepted_tokens
        acceptance = 1 + accepted / drafts if drafts else 1.0
        steps = max(1, steps)
        rate, step, mean = tokens / seconds, seconds / steps, held / steps
        return Measured(rate, acceptance, self._checksum, step, mean, nodes)

    def watch(self) -> None:
        """Begin to look at the engine, where somebody wants to; the window begins."""

    def watched(self, batch: int) -> Nodes:
        """Tell what was seen of each number of nodes; the window is over."""
        return {}

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
            )
            prompt = self._prompts[number % len(self._prompts)]
            sent = f"{params.temperature} {params.max_tokens} {params.seed} {prompt}"
            self._checksum = zlib.crc32(sent.encode(), self._checksum)
            yield prompt, params

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
        for output in self._engine.step():
            name = output.request_id
            if name not in self._emitted:
                continue
            found = len(output.outputs[0].token_ids)
            self._prompt_tokens[name] = len(output.prompt_token_ids)
            tokens += found - self._emitted[name]
            self._emitted[name] = found
            if output.finished:
                del self._emitted[name], self._prompt_tokens[name]
                ended += 1
        return tokens, ended

    def _held(self) -> int:
        return sum(self._prompt_tokens.values()) + sum(self._emitted.values())

    def _stop(self) -> None:
        self._engine.abort_request(list(self._emitted))
        self._emitted.clear()
        self._prompt_tokens.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


def calling_core() -> Any:
    """The engine core among the callers of a function that runs in a worker; None without one.

    Without tensor parallelism it runs in the worker's process. Only a benchmark may look for it.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "scheduler", None) is not None:
            return caller
        frame = frame.f_back
    return None


def calling_table() -> Any:
    """The scheduler's table of drafts by batch size among the callers; None without one."""
    return getattr(getattr(calling_core(), "scheduler", None), "dynamic_sd_lookup", None)


def fix_drafts(worker: Any, drafts: int) -> None:
    """Make every step draft `drafts` tokens; it runs in the worker."""
    table = calling_table()
    if table is None:
        raise RuntimeError(
            "no scheduler in the worker's process: give each length an arm of its own"
        )
    table[:] = [drafts] * len(table)
