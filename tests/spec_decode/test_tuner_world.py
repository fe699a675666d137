"""The tuner against the best fixed numbers, on an engine whose times and texts are an H200's.

Times are fitted to docs/benchmarks.md ("A step's time" and the tables above it), acceptance to
its lengths by temperature; every request is easier or harder than the average by its own.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence

import pytest

from vllm_graft.config import EagleConfig
from vllm_graft.graph_runners.widths import request_counts
from vllm_graft.spec_decode.policy import auto_schedule, dynamic
from vllm_graft.spec_decode.tuner import NodeTuner, fits

MAX_REQS, MAX_ROWS = 128, 512
CONFIG = EagleConfig(topk=8, steps=7, tree="auto")
COUNTS = request_counts(MAX_REQS)
# By text: the share of levels that are followed with many nodes, and with one.
TEXTS = {"0": (0.9, 0.8), "0.6": (0.93, 0.63), "1": (0.86, 0.5), "hard": (0.3, 0.12)}
HARDEST = (0.1, 0.03)
PROMPT_MS = 9.5


def schedule() -> list[int]:
    table = [0] * (MAX_REQS + 1)
    for first, last, nodes in auto_schedule(CONFIG, 63, MAX_REQS):
        table[first : last + 1] = [nodes] * (last - first + 1)
    return table


@functools.cache
def graph_ms(batch: int, nodes: int) -> float:
    """Milliseconds of the graphs that serve a batch, padding included."""
    count = min(count for count in COUNTS if count >= batch)
    spent = 4.5 + 0.024 * count + 0.0126 * max(count * (nodes + 1) - 8, 0)
    if nodes:
        shape = dynamic(CONFIG, nodes)
        spent += 0.26 + (shape.steps - 1) * (0.22 + 0.0009 * count * shape.topk)
    return spent


def step_ms(batch: int, nodes: int) -> float:
    return graph_ms(batch, nodes) + 0.35


def followed(text: tuple[float, float], nodes: int, offset: float = 0.0) -> float:
    """Chance that a level is followed."""
    most, one = text
    return min(0.98, max(0.01, most - (most - one) * ((nodes + 1) / 2) ** -0.6 + offset))


@functools.cache
def mean_length(text: tuple[float, float], nodes: int) -> float:
    if not nodes:
        return 1.0
    steps = dynamic(CONFIG, nodes).steps
    weights = {step / 4: math.exp(-((step / 4) ** 2) / 2) for step in range(-12, 13)}
    total = sum(
        weight * sum(followed(text, nodes, 0.08 * z) ** level for level in range(steps + 1))
        for z, weight in weights.items()
    )
    return total / sum(weights.values())


def rate(text: tuple[float, float], batch: int, nodes: int, prompts: float) -> float:
    """Tokens a request and millisecond."""
    return mean_length(text, nodes) / (step_ms(batch, nodes) + prompts * PROMPT_MS)


class Requests:
    """What the requests of an engine emit."""

    def __init__(self, text: tuple[float, float], seed: int) -> None:
        self.text, self.rng = text, random.Random(seed)
        self.offsets, self.left = [0.0] * MAX_REQS, [0] * MAX_REQS

    def emit(self, batch: int, nodes: int) -> list[int]:
        steps = dynamic(CONFIG, nodes).steps if nodes else 0
        return [self._one(slot, nodes, steps) for slot in range(batch)]

    def _one(self, slot: int, nodes: int, steps: int) -> int:
        if self.left[slot] == 0:
            self.offsets[slot], self.left[slot] = self.rng.gauss(0, 0.08), self.rng.randint(20, 80)
        self.left[slot] -= 1
        emitted, chance = 1, followed(self.text, nodes, self.offsets[slot])
        while emitted <= steps and self.rng.random() < chance:
            emitted += 1
        return emitted


def serve(
    tuner: NodeTuner,
    text: tuple[float, float],
    batches: Sequence[int],
    *,
    prompts: float = 0.0,
    seed: int = 0,
) -> float:
    """Throughput over that of the best number for each batch, exploration included."""
    requests, rng, previous = Requests(text, seed), random.Random(seed + 1), -1
    tokens = spent = best_tokens = best_spent = 0.0
    for batch in batches:
        nodes = tuner.choose(batch)
        ms = step_ms(batch, nodes) * rng.uniform(0.97, 1.05)
        beside = rng.random() < prompts
        if beside:
            ms += 1.5 + rng.expovariate(1 / 8)
        emitted = requests.emit(batch, nodes)
        seconds = ms / 1e3 if nodes == previous else None
        tuner.observe(nodes, emitted, seconds, batch=batch, prompts=beside)
        previous = nodes
        best = max(tuner.allowed(batch), key=lambda n: rate(text, batch, n, prompts))
        tokens += batch * mean_length(text, nodes)
        spent += step_ms(batch, nodes) + prompts * PROMPT_MS
        best_tokens += batch * mean_length(text, best)
        best_spent += step_ms(batch, best) + prompts * PROMPT_MS
    return tokens / spent / (best_tokens / best_spent)


def make(seeded: bool = True) -> NodeTuner:
    tuner = NodeTuner(schedule(), MAX_ROWS, COUNTS)
    if seeded:
        counts = [1, 2, 4, 8, 16, 32, 64, 128]
        tuner.seed(
            {
                nodes: {
                    count: graph_ms(count, nodes) / 1e3
                    for count in counts
                    if fits(count, nodes, MAX_ROWS)
                }
                for nodes in set(schedule())
            }
        )
    return tuner


def drifting(steps: int, seed: int) -> list[int]:
    """Another batch every 50 steps."""
    rng = random.Random(seed)
    return [batch for _ in range(steps // 50) for batch in [rng.randint(1, MAX_REQS)] * 50]


@pytest.mark.parametrize("prompts", [0.0, 0.3])
@pytest.mark.parametrize("text", TEXTS)
def test_large_batches(text: str, prompts: float) -> None:
    assert serve(make(), TEXTS[text], [64] * 3000, prompts=prompts) > 0.99


@pytest.mark.parametrize("prompts", [0.0, 0.3])
@pytest.mark.parametrize("text", TEXTS)
def test_batches_that_drift(text: str, prompts: float) -> None:
    assert serve(make(), TEXTS[text], drifting(3000, seed=5), prompts=prompts) > 0.97


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_small_batches(batch: int) -> None:
    """One request's text hides what the numbers are worth: within 3 % on average over texts."""
    ratios = [
        serve(make(), text, [batch] * 3000, seed=seed) for text in TEXTS.values() for seed in (0, 1)
    ]
    assert sum(ratios) / len(ratios) > 0.97
    assert min(ratios) > 0.9


@pytest.mark.parametrize("batch", [1, 16, 128])
def test_down_to_nothing(batch: int) -> None:
    tuner = make()
    assert serve(tuner, HARDEST, [batch] * 3000) > 0.98
    chosen = [tuner.choose(batch) for _ in range(12)]
    assert chosen.count(0) >= 6


@pytest.mark.parametrize("text", TEXTS)
def test_without_measured_costs(text: str) -> None:
    assert serve(make(seeded=False), TEXTS[text], drifting(3000, seed=6), prompts=0.3) > 0.96


def test_it_comes_back_when_the_text_gets_easy() -> None:
    tuner = make()
    serve(tuner, HARDEST, [64] * 1500)
    assert serve(tuner, TEXTS["0.6"], [64] * 1500, seed=3) > 0.85
    assert serve(tuner, TEXTS["0.6"], [64] * 500, seed=4) > 0.99
