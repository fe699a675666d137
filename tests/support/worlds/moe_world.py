"""A world for the tuner: target and draft with experts, whose measured costs may be wrong."""

import functools
import heapq
import random

from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.shapes import NARROW, Ladder, auto_schedule

MAX_REQS = 16
CONFIG = TreeConfig(topk=4, steps=7, shape="auto")

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


def numbers(ladder: Ladder = NARROW) -> set[int]:
    """Return the numbers of nodes that batches choose among."""
    return {0, *(nodes for *_, nodes in auto_schedule(CONFIG, 31, MAX_REQS, ladder))}


def told_ms(batch: int, nodes: int, slope: float, ladder: Ladder = NARROW) -> float:
    """Return what the start measured: what nodes cost, times `slope`.

    With a slope of 1 that is right. It is nearly 0 if rows were measured that all ask for the same
    experts.
    """
    without = step_ms(batch if slope >= 1 else 1, 0)
    return without + slope * (step_ms(batch, nodes, ladder) - step_ms(batch, 0)) - HOST_MS
