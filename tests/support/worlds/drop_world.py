"""A world for nodes that are dropped: a target with experts, and a draft that knows its chances."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from tests.support.references.tree_reference import nodes_kept
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.tuning.drops import KEEP_ALL, Drops, Price
from vllm_graft.spec_decode.tuning.shapes import DENSE, auto_schedule
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

MAX_REQS, MAX_ROWS, NODES = 16, 512, 63
CONFIG = TreeConfig(topk=8, steps=12, shape="auto")
SHAPES = {shape.num_nodes: shape for shape, _ in DENSE.within(CONFIG, NODES)}
TREES = 100
"""Different trees of each shape."""

TEXTS = {"chat": (1.6, 0.6), "mixed": (0.6, 0.35)}
"""Parameters of the beta distribution of how sure a draft is on average of a place in a text."""


class Tree(NamedTuple):
    """Chances of the nodes' paths, best first, and parents; the root comes first."""

    chances: list[float]
    parents: list[int]


@functools.cache
def trees(text: str, nodes: int) -> list[Tree]:
    """Grow trees of a shape; each draft is about as sure as its place in the text is easy."""
    drawn = random.Random(nodes)
    return [_grown(nodes, drawn.betavariate(*TEXTS[text]), drawn) for _ in range(TREES)]


def _grown(nodes: int, ease: float, drawn: random.Random) -> Tree:
    topk = SHAPES[nodes].topk
    found, level = list[tuple[float, int]](), [(1.0, -1)]
    for depth in range(SHAPES[nodes].steps):
        below = list[tuple[float, int]]()
        for chance, place in level[:topk]:
            sure = drawn.betavariate(max(3.9 * ease, 0.05), max(3.9 * (1 - ease), 0.05))
            sure *= 0.97**depth
            each = [sure] + [(1 - sure) * 0.45 * 0.55**rank for rank in range(topk - 1)]
            below += [(chance * child, place) for child in each]
        below.sort(reverse=True)
        level = [(chance, len(found) + place) for place, (chance, _) in enumerate(below)]
        found += below
    best = sorted(range(len(found)), key=lambda place: -found[place][0])[:nodes]
    number = {-1: 0} | {place: node for node, place in enumerate(best, 1)}
    parents = [number[found[place][1]] for place in best]
    return Tree([1.0, *(found[place][0] for place in best)], [-1, *parents])


@dataclass(frozen=True)
class World:
    """Seconds of a mixture's steps; those of Qwen3-30B-A3B on an H200 unless given.

    `alike`: the part of a row that counts for the experts that a text's rows ask for.
    `sure`: the power of a draft's probability that is its true one.
    """

    text: str
    batch: int
    share: float = 8 / 128
    experts: float = 17.6e-3
    dense: float = 2.9e-3
    level: float = 0.2e-3
    row: float = 8e-6
    alike: float = 1.0
    sure: float = 1.0

    def seconds(self, batch: int, nodes: int, rows: int, alike: float) -> float:
        """Seconds of a step of which so many rows ask for experts of their own."""
        levels = SHAPES[nodes].steps if nodes else 0
        part: float = 1 - (1 - self.share) ** (1 + (rows - 1) * alike)
        every = batch * (nodes + 1) * self.row
        return self.dense + levels * self.level + every + self.experts * part

    def emit(self, tree: Tree, kept: int, drawn: random.Random) -> int:
        node, count = 0, 1
        while True:
            left = drawn.random()
            for child in (n for n in range(1, kept + 1) if tree.parents[n] == node):
                left -= (tree.chances[child] / tree.chances[node]) ** self.sure
                if left < 0:
                    node, count = child, count + 1
                    break
            else:
                return count

    def tuner(self, *, drops: bool) -> NodeTuner:
        """A tuner that was told the costs of random tokens."""
        schedule = [0] * (MAX_REQS + 1)
        for first, last, nodes in auto_schedule(CONFIG, NODES, MAX_REQS):
            schedule[first : last + 1] = [nodes] * (last + 1 - first)
        levels = {nodes: shape.steps for nodes, shape in SHAPES.items()}
        dropping = Drops(self.share) if drops else None
        tuner = NodeTuner(schedule, MAX_ROWS, None, levels, experts=True, drops=dropping)
        tuner.seed(self.costs(schedule))
        return tuner

    def costs(self, schedule: list[int]) -> dict[int, dict[int, float]]:
        pairs = itertools.product(sorted({*schedule[1:]}), (1, 2, 4, 8, 16))
        found: dict[int, dict[int, float]] = {}
        for nodes, batch in pairs:
            if (rows := batch * (nodes + 1)) <= MAX_ROWS:
                found.setdefault(nodes, {})[batch] = self.seconds(batch, nodes, rows, 1.0)
        return found

    def rate(self, *, drops: bool, seed: int, steps: int = 3000) -> float:
        """Serve, and return tokens per second behind the first third of the steps."""
        tuner, drawn = self.tuner(drops=drops), random.Random(seed)
        tokens = total = 0.0
        before, nodes = 0, tuner.begin_step(self.batch)
        price = tuner.price
        for step in range(steps):
            served = [self._serve(nodes, price, drawn) for _ in range(self.batch)]
            emitted, rows = [each[0] for each in served], sum(each[1] for each in served)
            took = self.seconds(self.batch, nodes, rows, self.alike)
            took *= 1 + abs(drawn.gauss(0, 0.01))
            then, after = tuner.begin_step(self.batch), tuner.price
            timed = took if before == nodes == then else None
            tuner.observe(nodes, emitted, timed, dropped=price != KEEP_ALL)
            if step >= steps // 3:
                tokens, total = tokens + sum(emitted), total + took
            before, nodes, price = nodes, then, after
        return tokens / total

    def _serve(self, nodes: int, price: Price, drawn: random.Random) -> tuple[int, int]:
        """The tokens of a request, and the rows that ask for experts of their own."""
        if not nodes:
            return 1, 1
        tree, kept = drawn.choice(trees(self.text, nodes)), nodes
        if price != KEEP_ALL:
            logs = [math.log(max(chance, 1e-30)) for chance in tree.chances[1:]]
            kept = nodes_kept(logs, *price)
        return self.emit(tree, kept, drawn), kept + 1
