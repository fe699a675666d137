"""An engine that drafts n-grams alone: texts that repeat themselves, and texts that never do."""

import random
from collections import deque
from dataclasses import dataclass

from tests.support.worlds.tuner_world import COUNTS, MAX_REQS, ROWS, TARGET_MS, between, drawn
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.tuning.copied_texts import EVERY
from vllm_graft.spec_decode.tuning.shapes import auto_schedule
from vllm_graft.spec_decode.tuning.tuner import NodeTuner, fits

DEPTH, NODES, MAX_ROWS = 31, 63, 512
COMMON_MS, DRAFT_MS = 0.8, 0.04
"""The head, the sampler and the host; and finding matches."""

DEVICE_BOUND, HOST_BOUND = (0.0, 0.0), (9.2, 12.0)
"""Milliseconds of the host without and with drafts: a large target's, and a small one's beside what
its device takes, as on an H200 (1.85 and 2.4 ms of a 1.5B target)."""


def schedule(max_num_seqs: int = MAX_REQS) -> list[int]:
    config = TreeConfig(topk=4, steps=DEPTH, shape="auto")
    table = [0] * (max_num_seqs + 1)
    for first, last, nodes in auto_schedule(config, NODES, max_num_seqs, rests=True):
        table[first : last + 1] = [nodes] * (last - first + 1)
    return table


NUMBERS = sorted(set(schedule()))


def graph_ms(batch: int, nodes: int) -> float:
    rows = min(count for count in COUNTS if count >= batch) * (nodes + 1)
    return between(ROWS, TARGET_MS, rows) + (DRAFT_MS if nodes else 0.0)


def make(*, rests: bool = True, seeded: bool = True) -> NodeTuner:
    levels = {nodes: min(DEPTH, nodes) for nodes in NUMBERS if nodes}
    tuner = NodeTuner(schedule(), MAX_ROWS, COUNTS, levels, rests=rests)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    costs = {
        nodes: {size: graph_ms(size, nodes) / 1e3 for size in sizes if fits(size, nodes, MAX_ROWS)}
        for nodes in NUMBERS
    }
    tuner.seed(costs if seeded else {})
    return tuner


@dataclass
class Step:
    nodes: int
    ms: float
    tokens: int


class Engine:
    """A closed loop in which the scheduler chooses one step ahead of what is verified.

    A step takes as long as the host at least: `host` are its milliseconds without and with drafts.
    """

    def __init__(
        self, tuner: NodeTuner, batch: int, seed: int, host: tuple[float, float] = DEVICE_BOUND
    ) -> None:
        self.tuner, self.batch, self.rng, self.host = tuner, batch, random.Random(seed), host
        self.chosen, self.previous = deque([0]), -1

    def serve(self, chance: float, steps: int, *, others: bool = False) -> list[Step]:
        """Steps of texts whose next token is the one of a match with this chance; of `others` than
        in the steps before."""
        return [self._step(chance, same=not (others and not step)) for step in range(steps)]

    def answer(self, tokens: int, copies_from: int, *, told: bool = True) -> list[Step]:
        """Steps of other requests' answers of so many tokens, which copy from one of them on. The
        scheduler sees that, unless it isn't `told`."""
        steps, emitted = list[Step](), 0
        while emitted < tokens * self.batch:
            copied = emitted // self.batch - copies_from
            step = self._step(0.05 if copied < 0 else 0.95, same=bool(steps))
            emitted += step.tokens
            steps.append(step)
            if told and not step.nodes and self.tuner.copied and not len(steps) % EVERY:
                self.tuner.heed(max(0, copied))
        return steps

    def _step(self, chance: float, *, same: bool) -> Step:
        nodes, drafting = self.chosen.popleft(), self.tuner.begin_step(self.batch)
        self.chosen.append(drafting)
        emitted = [drawn(min(nodes, DEPTH), chance, self.rng) for _ in range(self.batch)]
        device = COMMON_MS + graph_ms(self.batch, nodes) * self.rng.uniform(0.98, 1.04)
        ms = max(device, self.host[nodes > 0] * self.rng.uniform(0.98, 1.04))
        alike = nodes == self.previous == drafting
        seconds = ms / 1e3 if alike else None
        self.tuner.observe(nodes, emitted, seconds, batch=self.batch, same=same)
        self.previous = nodes
        return Step(nodes, ms, sum(emitted))


def rate(steps: list[Step]) -> float:
    """Tokens per millisecond."""
    return sum(step.tokens for step in steps) / sum(step.ms for step in steps)


def fixed_rate(
    batch: int, nodes: int, chance: float = 0.0, host: tuple[float, float] = DEVICE_BOUND
) -> float:
    """The expected rate of one number of nodes for all steps."""
    length = sum(chance**level for level in range(min(nodes, DEPTH) + 1))
    ms = max(COMMON_MS + 1.01 * graph_ms(batch, nodes), 1.01 * host[nodes > 0])
    return batch * length / ms


def best_rate(batch: int, chance: float, host: tuple[float, float] = DEVICE_BOUND) -> float:
    fitting = [nodes for nodes in NUMBERS if fits(batch, nodes, MAX_ROWS)]
    return max(fixed_rate(batch, nodes, chance, host) for nodes in fitting)
