"""The tuner in closed loops: a wave of prompts, then one beside the trees whenever a request ends.

`vllm-graft bench trees` measures like this: so many requests are in flight, the next begins when
one ends, and the tuner of one engine meets other texts and batches one after another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.tuner_world import (
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


def step_ms(decodes: int, nodes: int, prompts: int, drafting: int) -> float:
    """Return milliseconds of a step that verifies `nodes` per request and drafts `drafting`."""
    padded = min(count for count in COUNTS if count >= max(decodes, 1))
    rows = decodes * (nodes + 1) + prompts * PROMPT if prompts else padded * (nodes + 1)
    pieces = PIECEWISE_MS * (rows > MAX_ROWS)
    return 0.5 + pieces + verify_ms(rows) + draft_ms(decodes + prompts, drafting)


@dataclass
class Loop:
    """Requests of a text, `batch` of them in flight."""

    text: str
    batch: int
    seed: int
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
            ms = step_ms(len(self.live), verified, len(new), drafting)
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


def against_the_best(tuner: NodeTuner, text: str, batch: int, seed: int) -> float:
    """Return throughput over that of the best fixed number; the tuner keeps what it has learned."""
    numbers = {nodes for nodes in schedule() if fits(batch, nodes, MAX_ROWS)}

    def fixed(nodes: int) -> float:
        return Loop(text, batch, seed).rate(lambda batch: nodes)

    best = max(fixed(nodes) for nodes in numbers)
    return Loop(text, batch, seed).rate(tuner.begin_step, tuner.observe) / best


def test_texts_and_batches_in_turn() -> None:
    tuner = make()
    ratios = {
        (text, batch): against_the_best(tuner, text, batch, seed=1)
        for text in ("0", "1", "0.6")
        for batch in (16, 4, 64, 1, 128)
    }
    assert sum(ratios.values()) / len(ratios) > 0.97
    assert min(ratios.values()) > 0.88, ratios


def test_waves_of_prompts_do_not_count_as_what_prompts_add() -> None:
    """After the first wave, whose step takes 20 times as long, few nodes pay in a large batch."""
    for seed in range(3):
        assert against_the_best(make(), "1", 64, seed) > 0.93
