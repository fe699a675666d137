"""The tuner in closed loops: a wave of prompts, then one whenever a request ends."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.worlds.tuner_world import (
    COUNTS,
    MAX_ROWS,
    SPREAD,
    draft_ms,
    emit,
    make,
    schedule,
    verify_ms,
)
from vllm_graft.spec_decode.tuning.tuner import NodeTuner, fits

PROMPT, TOKENS = 110, 160
PIECEWISE_MS = 10.0
"""How much longer a step takes if it fits no graph."""

IN_ALL = {1: 12, 4: 36, 16: 96, 64: 256, 128: 384}


def device_ms(decodes: int, nodes: int, prompts: int, drafting: int) -> float:
    """Return milliseconds of the device in a step, see `step_ms`."""
    padded = min(count for count in COUNTS if count >= max(decodes, 1))
    rows = decodes * (nodes + 1) + prompts * PROMPT if prompts else padded * (nodes + 1)
    pieces = PIECEWISE_MS * (rows > MAX_ROWS)
    return pieces + verify_ms(rows) + draft_ms(decodes + prompts, drafting)


def step_ms(decodes: int, nodes: int, prompts: int, drafting: int) -> float:
    """Return milliseconds of a step that verifies `nodes` per request and drafts `drafting`."""
    return 0.5 + device_ms(decodes, nodes, prompts, drafting)


@dataclass
class Loop:
    """Requests of a text, `batch` of them in flight."""

    text: str
    batch: int
    seed: int
    step_ms: Callable[[int, int, int, int], float] = step_ms
    live: list[int] = field(default_factory=list)
    begun: int = 0

    def __post_init__(self) -> None:
        self.requests = IN_ALL[self.batch]
        self.rng = random.Random(self.seed * 1000 + self.batch)
        self.offsets = [SPREAD * self.rng.gauss(0, 1) for _ in range(self.requests)]
        shares = [0.3 + 0.7 * (number + 1) / self.batch for number in range(self.batch)]
        shares += [1.0] * (self.requests - self.batch)
        self.left = [max(2, round(share * TOKENS)) for share in shares]

    def rate(
        self, choose: Callable[[int], int], observe: Callable[..., None] = lambda *_, **__: None
    ) -> float:
        """Measure tokens per millisecond, from when all decode until one ends unreplaced."""
        verified, previous, tokens, spent, counting = 0, -1, 0, 0.0, False
        while True:
            first = self.begun
            self.begun = min(self.requests, first + self.batch - len(self.live))
            new = list(range(first, self.begun))
            batch = len(self.live) + len(new)
            drafting = choose(batch)
            ms = self.step_ms(len(self.live), verified, len(new), drafting)
            emitted = [
                emit(self.text, verified, self.offsets[request], self.rng) for request in self.live
            ]
            if self.live:
                alike = previous == verified == drafting
                seconds = ms * self.rng.uniform(0.98, 1.04) / 1e3 if alike else None
                observe(verified, emitted, seconds, batch=batch, prompts=len(new) * PROMPT)
            previous = verified
            if counting:
                tokens += sum(emitted) + len(new)
                spent += ms
            ended = self._advance(emitted, new)
            counting = counting or len(self.live) == self.batch
            if counting and ended > self.requests - self.begun:
                return tokens / spent
            verified = drafting

    def _advance(self, emitted: list[int], new: list[int]) -> int:
        for request, count in zip([*self.live, *new], [*emitted, *[1] * len(new)]):
            self.left[request] -= count
        live = [*self.live, *new]
        self.live = [request for request in live if self.left[request] > 0]
        return len(live) - len(self.live)


def against_the_best(
    tuner: NodeTuner,
    text: str,
    batch: int,
    seed: int,
    step_ms: Callable[[int, int, int, int], float] = step_ms,
) -> float:
    """Return throughput over that of the best fixed number; the tuner keeps what it has learned."""
    numbers = {nodes for nodes in schedule() if fits(batch, nodes, MAX_ROWS)}

    def fixed(nodes: int) -> float:
        return Loop(text, batch, seed, step_ms).rate(lambda batch: nodes)

    best = max(fixed(nodes) for nodes in numbers)
    return Loop(text, batch, seed, step_ms).rate(tuner.begin_step, tuner.observe) / best


@dataclass(frozen=True)
class SmallModel:
    """A model whose steps the host bounds, while the device has little to do."""

    part: float = 0.25
    host_ms: float = 4.5

    def step_ms(self, decodes: int, nodes: int, prompts: int, drafting: int) -> float:
        """Return milliseconds of a step, see `step_ms`."""
        return max(self.host_ms, 0.5 + self.part * device_ms(decodes, nodes, prompts, drafting))

    def tuner(self) -> NodeTuner:
        """A tuner that was told what steps cost the device."""
        tuner = make()
        tuner.seed(
            {
                nodes: {size: self.part * seconds for size, seconds in costs.items()}
                for nodes, costs in tuner.costs.items()
            }
        )
        return tuner

    def against_the_best(self, text: str, batch: int, seed: int = 1) -> float:
        """Return a new tuner's throughput over that of the best fixed number."""
        return against_the_best(self.tuner(), text, batch, seed, self.step_ms)
