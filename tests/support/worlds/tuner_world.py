"""A world for the tuner: times of an engine, and texts, as they were measured on an H200.

Times of graphs and mean acceptance lengths were measured at commit 4d45014; every request is
easier or harder than the average by an offset of its own.
"""

import functools
import random
from bisect import bisect_left
from collections.abc import Sequence

from vllm_graft.graph_runners.language.widths import request_counts
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.tuning.shapes import auto_schedule, dynamic
from vllm_graft.spec_decode.tuning.tuner import NodeTuner, fits

MAX_REQS, MAX_ROWS = 128, 1024
CONFIG = TreeConfig(topk=8, steps=12, shape="auto")
COUNTS = request_counts(MAX_REQS)

ROWS = (1, 64, 96, 128, 192, 256, 288, 384, 512, 768, 1024)
TARGET_MS = (4.12, 4.38, 4.6, 4.72, 5.69, 6.14, 7.27, 8.43, 10.09, 15.31, 19.33)
HEAD_AND_EXTEND_MS = (0.49, 0.54, 0.56, 0.57, 0.61, 0.65, 0.7, 0.88, 1.11, 1.55, 1.94)

REQUESTS = (1, 4, 16, 32, 64, 128)
LEVEL_MS = {
    1: (0.23, 0.232, 0.236, 0.245, 0.269, 0.339),
    2: (0.23, 0.232, 0.236, 0.245, 0.269, 0.339),
    4: (0.232, 0.237, 0.249, 0.272, 0.347, 0.6),
    8: (0.244, 0.256, 0.291, 0.378, 0.637, 1.2),
}

LENGTHS = {
    "0": {
        1: 1.86,
        2: 2.63,
        3: 3.31,
        6: 4.09,
        7: 5.44,
        14: 4.26,
        15: 6.16,
        30: 5.02,
        31: 7.66,
        63: 6.19,
    },
    "0.6": {
        1: 1.76,
        2: 2.38,
        3: 2.91,
        6: 3.6,
        7: 4.33,
        14: 3.94,
        15: 4.97,
        30: 4.58,
        31: 6.06,
        63: 5.49,
    },
    "1": {
        1: 1.57,
        2: 1.93,
        3: 2.19,
        6: 2.67,
        7: 2.76,
        14: 3.09,
        15: 3.23,
        30: 3.49,
        31: 3.56,
        63: 3.93,
    },
}
HARD = 0.25
"""Fraction of the drafts accepted at temperature 1 that stays in a text the draft never saw."""

SPREAD = 0.08
"""Standard deviation, between requests, of the chance that a level is followed."""


@functools.cache
def shape(nodes: int) -> TreeShape:
    return dynamic(CONFIG, nodes)


def schedule() -> list[int]:
    table = [0] * (MAX_REQS + 1)
    for first, last, nodes in auto_schedule(CONFIG, 63, MAX_REQS):
        table[first : last + 1] = [nodes] * (last - first + 1)
    return table


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    place = min(max(bisect_left(xs, x), 1), len(xs) - 1)
    below, above = xs[place - 1], xs[place]
    return ys[place - 1] + (ys[place] - ys[place - 1]) * (x - below) / (above - below)


@functools.cache
def graph_ms(batch: int, nodes: int) -> float:
    """Return milliseconds of the graphs that fit a batch, padding included."""
    count = min(count for count in COUNTS if count >= batch)
    return verify_ms(count * (nodes + 1)) + draft_ms(count, nodes)


def verify_ms(rows: int) -> float:
    """Return milliseconds of the target, its head and the draft's extend pass."""
    return between(ROWS, TARGET_MS, rows) + between(ROWS, HEAD_AND_EXTEND_MS, rows)


def draft_ms(requests: int, nodes: int) -> float:
    """Return milliseconds of the levels of trees of so many nodes."""
    if not nodes:
        return 0.0
    tree = shape(nodes)
    return (tree.steps - 1) * between(REQUESTS, LEVEL_MS[tree.topk], requests)


@functools.cache
def mean_length(text: str | float, nodes: int) -> float:
    if not nodes:
        return 1.0
    if text == "hard":
        text = HARD
    if isinstance(text, float):
        return 1 + text * (LENGTHS["1"][nodes] - 1)
    return LENGTHS[text][nodes]


def kept(chance: float) -> float:
    return min(0.99, max(0.005, chance))


@functools.cache
def followed(steps: int, mean: float) -> float:
    """Find the chance of following a level with which requests emit the mean length on average."""
    low, high = 0.0, 1.2
    for _ in range(40):
        middle = (low + high) / 2
        lengths = [
            sum(kept(middle + SPREAD * z) ** level for level in range(steps + 1))
            for z in (-1.5, -0.5, -0.5, 0.5, 0.5, 1.5)
        ]
        low, high = (middle, high) if sum(lengths) / 6 < mean else (low, middle)
    return low


def drawn(steps: int, chance: float, rng: random.Random) -> int:
    """Draw how many tokens a request emits that follows each level with a chance."""
    emitted = 1
    while emitted <= steps and rng.random() < chance:
        emitted += 1
    return emitted


def emit(text: str | float, nodes: int, offset: float, rng: random.Random) -> int:
    """Draw how many tokens a request emits whose chance differs from the text's by `offset`."""
    if not nodes:
        return 1
    steps = shape(nodes).steps
    return drawn(steps, kept(followed(steps, mean_length(text, nodes)) + offset), rng)


def make(seeded: bool = True) -> NodeTuner:
    numbers = {nodes for nodes in schedule() if nodes}
    levels = {nodes: shape(nodes).steps for nodes in numbers}
    tuner = NodeTuner(schedule(), MAX_ROWS, COUNTS, levels)
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
