"""Sends requests to an engine and times their tokens."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


@dataclass
class Answer:
    """One request and its answer. Times are of `time.perf_counter`, in seconds. `cached` counts
    prompt tokens that were cached, on the device or by the connector."""

    prompt: list[int]
    submitted: float
    first: float = 0.0
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    reason: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token in seconds."""
        return self.first - self.submitted


def random_prompt(seed: str, length: int, vocab: int) -> list[int]:
    """Draw token ids in [16, vocab), the same for the same `seed`."""
    return random.Random(seed).choices(range(16, vocab), k=length)


class Driver:
    """One engine and its requests, which have `emitted` so many tokens."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine: Any = llm.llm_engine
        self._running: dict[str, Answer] = {}
        self._count = 0
        self.emitted = 0

    def now(self) -> float:
        return time.perf_counter()

    def rest(self) -> None:
        """Let a little time pass in which the engine has nothing to do."""
        time.sleep(0.001)

    def submit(self, prompt: list[int], max_tokens: int, came: float | None = None) -> str:
        """Send a greedy request that ``came`` at a time, by default now; returns its id."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._count += 1
        name = f"bench-{self._count}"
        self._running[name] = Answer(prompt, self.now() if came is None else came)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> dict[str, Answer]:
        """Let the engine work until it has outputs; return the answers that ended."""
        finished = {}
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            answer = self._running.get(output.request_id)
            if answer is None:
                continue
            tokens = list(output.outputs[0].token_ids)
            self.emitted += len(tokens) - len(answer.tokens)
            answer.tokens = tokens
            if tokens and not answer.first:
                answer.first = now
                answer.cached = output.num_cached_tokens or 0
            if output.finished:
                answer.reason = output.outputs[0].finish_reason
                finished[output.request_id] = self._running.pop(output.request_id)
        return finished

    @property
    def busy(self) -> int:
        return len(self._running)

    @property
    def waiting_for_first(self) -> int:
        return sum(not answer.tokens for answer in self._running.values())

    def run(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        names = [self.submit(prompt, max_tokens) for prompt in prompts]
        done: dict[str, Answer] = {}
        while self.busy:
            done |= self.step()
        return [done[name] for name in names]

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])
        self._running.pop(name, None)

    def abort_all(self) -> None:
        self._engine.abort_request(list(self._running))
        self._running.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def settle(self, seconds: float = 0.05) -> None:
        """Let copies that are under way end: a connector gets a few steps to notice them."""
        for _ in range(3):
            time.sleep(seconds)
            self.run([[3, 4, 5, 6]], 2)

    def forget_device(self, connector: bool = False) -> None:
        """Empty the prefix cache of the device, and with `connector` the connector's as well."""
        for _ in range(20):
            if self._llm.reset_prefix_cache(reset_connector=connector):
                return
            self.settle()
        raise RuntimeError("reset_prefix_cache was refused 20 times: blocks stay in use")
