"""Batches whose requests differ: some copy their own text, as edits do, others are chats.

Times are those of `tuner_world`. A pass whose rows are shared takes a little longer than one of as
many rows in which all requests have the same number.
"""

import functools
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support.worlds.tuner_world import COUNTS, draft_ms, graph_ms, schedule, shape, verify_ms
from vllm_graft.graph_runners.language.mixed import mixed_sizes
from vllm_graft.spec_decode.tuning.tuner import NodeTuner, fits

MAX_ROWS = 512
SIZES = mixed_sizes([1, 2, 4, *range(8, 257, 8), *range(272, MAX_ROWS + 1, 16)])
SHARED = 1.03
"""Time of a pass of shared rows over that of one of as many rows."""

OTHER_MS = 0.5
CHAT = (0.55, 0.11, 0.05, 0.03, 0.02, 0.015, 0.01, 0.01)
"""Chances that a draft's likeliest tokens are drawn, in a chat at temperature 1."""

EASY = (0.85, 0.05, 0.02, 0.01, 0.01, 0.0, 0.0, 0.0)
"""The same in greedy text."""

SPREAD = 0.06
COPIED, TYPED = 40, 1.5
"""Mean tokens that an edit copies in a row, and that it writes anew in between."""

TOKENS = 600
Path = tuple[int, ...]


@functools.cache
def tree(chances: tuple[float, ...], nodes: int, width: int) -> frozenset[Path]:
    """Return the first `width` nodes of a tree, each as the ranks of the tokens on its path."""
    kept, waiting = set[Path](), [(-1.0, Path())]
    while waiting and len(kept) <= width:
        chance, path = heapq.heappop(waiting)
        kept.add(path)
        if len(path) < shape(nodes).steps:
            for rank, each in enumerate(chances[: shape(nodes).topk]):
                heapq.heappush(waiting, (chance * each, (*path, rank)))
    return frozenset(kept)


@dataclass
class Request:
    """A request that has a number of tokens left; of an edit, some of them to copy."""

    name: str
    kind: str
    rng: random.Random
    left: int = TOKENS
    copied: int = 0

    def __post_init__(self) -> None:
        first, *others = CHAT if self.kind == "chat" else EASY
        offset = SPREAD * self.rng.gauss(0, 1)
        self.chances = (min(first + offset, 0.99 - sum(others)), *others)

    def emit(self, nodes: int, width: int) -> int:
        """Draw the tokens of a step that verifies `width` of `nodes` nodes."""
        if self.kind == "edit" and self.copied <= 0 and self.rng.random() < 1 / TYPED:
            self.copied = 1 + int(self.rng.expovariate(1 / COPIED))
        if self.copied > 0:
            emitted = min(width, self.copied) + 1
            self.copied -= emitted
        elif not width:
            emitted = 1
        else:
            kept, path = tree(CHAT if self.kind == "chat" else EASY, nodes, width), Path()
            while True:
                (rank,) = self.rng.choices(range(9), (*self.chances, 1 - sum(self.chances)))
                if (*path, rank) not in kept:
                    break
                path = (*path, rank)
            emitted = len(path) + 1
        self.left -= emitted
        return emitted


class Served(NamedTuple):
    """Tokens per millisecond, and the part of the steps that were shared."""

    rate: float
    shared: float


@dataclass
class Engine:
    """Serves so many requests at once, whose kinds are taken in turn."""

    batch: int
    kinds: Sequence[str]
    seed: int = 0
    others: Callable[[], float] = lambda: 0.0
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self.begun = random.Random(self.seed), 0
        self.requests = [self._new(slot) for slot in range(self.batch)]

    def _new(self, slot: int) -> Request:
        self.begun += 1
        kind = self.kinds[slot % len(self.kinds)]
        return Request(f"{self.begun}", kind, random.Random(self.seed * 1000 + self.begun))

    def serve(self, tuner: NodeTuner, steps: int) -> Served:
        tokens = spent = 0.0
        verified, share, previous, shared = 0, None, None, 0
        for _ in range(steps):
            drafting = tuner.begin_step(self.batch)
            next_share = tuner.share
            names = [each.name for each in self.requests]
            widths = share.of(names, MAX_ROWS) if share else [verified] * self.batch
            shared += share is not None
            rows = sum(widths) + self.batch
            if share:
                ms = SHARED * verify_ms(min(size for size in SIZES if size >= rows))
            else:
                ms = graph_ms(self.batch, verified) - draft_ms(self.batch, verified)
            ms += draft_ms(self.batch, drafting) + OTHER_MS
            emitted = [r.emit(verified, width) for r, width in zip(self.requests, widths)]
            tokens += sum(emitted)
            spent += ms
            kind = (verified, share is None)
            alike = previous == kind == (drafting, next_share is None)
            seconds = ms * self.rng.uniform(0.98, 1.04) / 1e3 if alike else None
            tuner.observe(
                verified,
                emitted,
                seconds,
                batch=self.batch,
                names=names,
                widths=widths if share else (),
                share=share,
            )
            previous, verified, share = kind, drafting, next_share
            self.requests = [
                each if each.left > 0 else self._new(slot)
                for slot, each in enumerate(self.requests)
            ]
        return Served(tokens / spent, shared / steps)


def make(*, shares: bool = True) -> NodeTuner:
    """Make a tuner that was told what steps and their parts cost."""
    numbers = sorted(set(schedule()))
    levels = {nodes: shape(nodes).steps for nodes in numbers if nodes}
    tuner = NodeTuner(schedule(), MAX_ROWS, COUNTS, levels)
    fitting = {n: [c for c in COUNTS if fits(c, n, MAX_ROWS)] for n in numbers}
    costs = {n: {c: graph_ms(c, n) / 1e3 for c in counts} for n, counts in fitting.items()}
    parts = {n: {c: draft_ms(c, n) / 1e3 for c in counts} for n, counts in fitting.items() if n}
    parts[0] = {size: SHARED * verify_ms(size) / 1e3 for size in SIZES}
    tuner.seed(costs, parts if shares else None)
    return tuner


def gain(batch: int, kinds: Sequence[str], steps: int = 3000, seed: int = 0) -> float:
    """Return throughput with shares over that with one number for all."""
    ours, uniform = (
        Engine(batch, kinds, seed).serve(make(shares=shares), steps) for shares in (True, False)
    )
    return ours.rate / uniform.rate
