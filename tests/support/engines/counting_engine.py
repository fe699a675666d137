"""An engine that counts what comes, on a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Clock:
    """A clock that stands still between steps."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Engine:
    """An engine whose requests emit two tokens per step, one of them a draft; 100 ms per step."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.live = clock, dict[str, list[int]]()
        self.sent, self.steps = list[tuple[str, int]](), list[int]()
        self.drafts = self.accepted = 0

    def add_request(self, name: str, prompt: str, params: Any) -> None:
        self.live[name] = [0, params.max_tokens]
        self.sent.append((prompt, params.seed))

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.live.pop(name)

    def has_unfinished_requests(self) -> bool:
        return bool(self.live)

    def step(self) -> list[Any]:
        self.clock.now += 0.1
        self.steps.append(len(self.live))
        outputs = []
        for name, (emitted, most) in list(self.live.items()):
            now = min(most, emitted + 2)
            self.live[name][0] = now
            self.drafts, self.accepted = self.drafts + 1, self.accepted + now - emitted - 1
            if now == most:
                del self.live[name]
            tokens = [SimpleNamespace(token_ids=[0] * now, logprobs=None)]
            answer = {"request_id": name, "prompt_token_ids": [1] * 10, "outputs": tokens}
            outputs.append(SimpleNamespace(**answer, finished=now == most))
        return outputs


class Llm:
    """The ``vllm.LLM`` of such an engine, whose worker is none."""

    def __init__(self, engine: Engine) -> None:
        self.llm_engine = engine

    def collective_rpc(self, function: Any, args: tuple[Any, ...] = ()) -> list[Any]:
        return [function(None, *args)]


def counters(llm: Any) -> Any:
    """Stands for `vllm_graft.testing.spec_metrics`."""
    engine = llm.llm_engine
    return SimpleNamespace(drafts=engine.drafts, accepted_tokens=engine.accepted)
