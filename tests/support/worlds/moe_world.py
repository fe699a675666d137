"""A world for the tuner: target and draft with experts, whose measured costs may be wrong."""

import functools
import heapq
import random
from dataclasses import dataclass, field

from vllm_graft.graph_runners.language.widths import request_counts
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.tuning.shapes import NARROW, Ladder, auto_schedule
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

MAX_REQS, MAX_ROWS = 16, 512
CONFIG = TreeConfig(topk=4, steps=7, shape="auto")
BATCHES = (1, 2, 4, 8, 16)

EXPERTS, EXPERTS_PER_ROW = 128, 10

STEP_MS = 3.3
"""A step of one row without drafts."""

EXPERT_MS, ROW_MS = 0.012, 0.04
"""Each further expert that any row of the target asks for, and each further row by itself."""

DRAFTING_MS, LEVEL_MS = 0.2, 0.03
"""That there is a tree, and a level below its first."""

LEVEL_EXPERT_MS = 0.004
"""Each expert that any row of a level asks for."""

HOST_MS = 0.45
"""The part of a step that isn't measured at the start."""

TEXTS = {
    "easy": (0.82, 0.06, 0.03, 0.02),
    "usual": (0.7, 0.1, 0.05, 0.03),
    "hard": (0.45, 0.12, 0.08, 0.05),
}
SPREAD = 0.05
"""Standard deviation, between requests, of the chance of a draft's first token."""

TOKENS = 220
"""Tokens of a request."""

Path = tuple[int, ...]


def experts(rows: int, most: int = EXPERTS, each: int = EXPERTS_PER_ROW) -> float:
    """Return how many experts of `most` so many rows ask for, if each asks for random ones."""
    return most * (1 - (1 - each / most) ** rows)


@functools.cache
def shape_of(nodes: int, ladder: Ladder = NARROW) -> TreeShape:
    """Return how a number of nodes is drafted."""
    *_, (shape, _) = ladder.within(CONFIG, nodes)
    return shape


@functools.cache
def step_ms(batch: int, nodes: int, ladder: Ladder = NARROW) -> float:
    """Return milliseconds of a step."""
    rows = batch * (nodes + 1)
    found = STEP_MS + EXPERT_MS * (experts(rows) - experts(1)) + ROW_MS * (rows - 1)
    if not nodes:
        return found
    tree = shape_of(nodes, ladder)
    level = LEVEL_MS + LEVEL_EXPERT_MS * experts(batch * tree.topk)
    return found + DRAFTING_MS + (tree.steps - 1) * level


@functools.cache
def tree(text: str, nodes: int, ladder: Ladder = NARROW) -> frozenset[Path]:
    """Return the likeliest nodes, each as the ranks of the tokens on its path."""
    shape, kept = shape_of(nodes, ladder), set[Path]()
    chances = TEXTS[text][: shape.topk]
    waiting: list[tuple[float, Path]] = [(-1.0, ())]
    while waiting and len(kept) <= nodes:
        chance, path = heapq.heappop(waiting)
        kept.add(path)
        if len(path) < shape.steps:
            for rank, each in enumerate(chances):
                heapq.heappush(waiting, (chance * each, (*path, rank)))
    return frozenset(kept)


@functools.cache
def mean_length(text: str, nodes: int, ladder: Ladder = NARROW) -> float:
    """Return tokens per step of a request without an offset."""
    if not nodes:
        return 1.0
    total = 0.0
    for path in tree(text, nodes, ladder):
        chance = 1.0
        for rank in path:
            chance *= TEXTS[text][rank]
        total += chance
    return total


def emit(text: str, nodes: int, offset: float, rng: random.Random, ladder: Ladder = NARROW) -> int:
    """Draw how many tokens a request emits whose first token's chance differs by `offset`."""
    if not nodes:
        return 1
    first, *others = TEXTS[text]
    chances = (min(first + offset, 0.97 - sum(others)), *others)
    kept = tree(text, nodes, ladder)
    path: Path = ()
    while True:
        (rank,) = rng.choices(range(5), (*chances, 1 - sum(chances)))
        if (*path, rank) not in kept:
            return len(path) + 1
        path = (*path, rank)


PROMPT_MS = 9.5


def prompt_fraction(text: str, nodes: int, prompts: float, ladder: Ladder = NARROW) -> float:
    """Return the fraction of steps with a prompt: constant per token, `prompts` with 7 nodes."""
    return min(1.0, prompts * mean_length(text, nodes, ladder) / mean_length(text, 7))


def rate(text: str, batch: int, nodes: int, prompts: float = 0.0, ladder: Ladder = NARROW) -> float:
    """Return tokens per request and millisecond."""
    beside = prompt_fraction(text, nodes, prompts, ladder) * PROMPT_MS
    return mean_length(text, nodes, ladder) / (step_ms(batch, nodes, ladder) + beside)


def make(
    largest: int = 15, slope: float = 1.0, *, experts: bool = True, ladder: Ladder = NARROW
) -> NodeTuner:
    """Make a tuner that was told what nodes cost, times `slope`.

    With a slope of 1 it was told right. It is nearly 0 if rows were measured that all ask for the
    same experts. Without `experts` it knows of none, and trusts what it was told.
    """
    table = [0] * (MAX_REQS + 1)
    for first, last, nodes in auto_schedule(CONFIG, largest, MAX_REQS, ladder):
        table[first : last + 1] = [nodes] * (last - first + 1)
    numbers = set(table)
    levels = {nodes: shape_of(nodes, ladder).steps for nodes in numbers if nodes}
    counts = request_counts(MAX_REQS)
    tuner = NodeTuner(table, MAX_ROWS, counts, levels, experts=experts)
    tuner.seed(
        {
            nodes: {batch: told_ms(batch, nodes, slope, ladder) / 1e3 for batch in BATCHES}
            for nodes in numbers
        }
    )
    return tuner


def told_ms(batch: int, nodes: int, slope: float, ladder: Ladder = NARROW) -> float:
    """Return what the start measured."""
    without = step_ms(batch if slope >= 1 else 1, 0)
    return without + slope * (step_ms(batch, nodes, ladder) - step_ms(batch, 0)) - HOST_MS


@dataclass
class Service:
    """Batches of one size and text, served one step after another.

    Attributes:
        prompts: fraction of steps that a prompt runs in, where 7 nodes are verified.
        hiccups: fraction of steps that begin ten steps which the host makes 1 to 6 ms longer.
    """

    text: str
    batch: int
    seed: int = 0
    prompts: float = 0.0
    hiccups: float = 0.0
    ladder: Ladder = NARROW
    uses: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.offsets, self.left = [0.0] * self.batch, [0] * self.batch

    def against_the_best(self, tuner: NodeTuner, steps: int) -> float:
        """Return throughput over that of the best number, exploration included."""
        tokens = spent = 0.0
        previous, disturbed = -1, 0
        best = max(
            rate(self.text, self.batch, nodes, self.prompts, self.ladder)
            for nodes in {0, *tuner.allowed(self.batch)}
        )
        for _ in range(steps):
            nodes = tuner.begin_step(self.batch)
            self.uses[nodes] = self.uses.get(nodes, 0) + 1
            fraction = prompt_fraction(self.text, nodes, self.prompts, self.ladder)
            usual = step_ms(self.batch, nodes, self.ladder)
            beside = self.rng.random() < fraction
            ms = usual * self.rng.uniform(0.97, 1.05)
            ms += beside * (1.5 + self.rng.expovariate(1 / 8))
            if self.rng.random() < self.hiccups:
                disturbed = 10
            if disturbed:
                disturbed, ms = disturbed - 1, ms + self.rng.uniform(1, 6)
            seconds = ms / 1e3 if nodes == previous else None
            tuner.observe(nodes, self._emit(nodes), seconds, batch=self.batch, prompts=beside)
            previous = nodes
            tokens += mean_length(self.text, nodes, self.ladder)
            spent += usual + fraction * PROMPT_MS
        return tokens / spent / best

    def _emit(self, nodes: int) -> list[int]:
        found = []
        for slot in range(self.batch):
            if self.left[slot] <= 0:
                self.offsets[slot], self.left[slot] = SPREAD * self.rng.gauss(0, 1), TOKENS
            emitted = emit(self.text, nodes, self.offsets[slot], self.rng, self.ladder)
            self.left[slot] -= emitted
            found.append(emitted)
        return found
