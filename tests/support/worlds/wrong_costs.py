"""Batches whose tuner was told wrong costs, as by an engine that starts beside another one.

The worlds are those of `tuner_world` and `moe_world`, and a dense target of Qwen3.5-9B's shapes,
of which three engines started at a time measured the wrong costs below. All have prompts in some
steps, noise, and hiccups of the host. Drafts of a step are verified in the next one, as in an
engine, so that a block of a choice yields two timings fewer than it has steps.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tests.support.worlds import moe_world, tuner_world
from tests.support.worlds.tuner_world import drawn, followed, kept, shape
from vllm_graft.graph_runners.language.widths import request_counts
from vllm_graft.spec_decode.tuning.shapes import NARROW, Ladder
from vllm_graft.spec_decode.tuning.tuner import NodeTuner

NOISE = 0.03
"""Standard deviation of a step's time, as a part of it."""

HICCUPS = 0.002
"""Fraction of steps that begin ten steps which the host makes 1 to 6 ms longer."""

PROMPTS = 0.14

PROMPT_MS = 9.5
OTHER_MS = 0.4
"""The part of a step that isn't measured at the start."""

LATER = 1000

TURN = 120
"""Steps after which contexts of another length come, in worlds that have both."""

SPREAD = 0.08
TOKENS = 220

LENGTHS = {1: 1.71, 2: 2.26, 3: 2.63, 6: 3.0, 7: 3.3, 14: 3.24, 15: 3.74}
"""Acceptance lengths of Qwen3.5-9B's shapes with made-up weights and known acceptance."""

SIXTEEN = {0: 4.8, 1: 4.9, 2: 5.7, 3: 6.2, 6: 7.1, 7: 9.0, 14: 7.6, 15: 10.2}
"""Milliseconds at 16 requests, as an undisturbed engine measured them."""

SIXTEEN_WRONG = {0: 5.0, 1: 5.2, 2: 10.0, 3: 12.8, 6: 15.1, 7: 20.0, 14: 12.4, 15: 20.2}

FOUR = {0: 4.6, 1: 4.7, 2: 5.3, 3: 5.6, 6: 6.3, 7: 7.4, 14: 6.4, 15: 7.9}
"""At 4 requests. Those of 6 and 14 nodes were measured, the others are guessed between them."""

FOUR_WRONG = {0: 4.7, 1: 4.8, 2: 5.8, 3: 6.7, 6: 7.8, 7: 10.6, 14: 11.7, 15: 19.6}

FAR_LENGTHS = {15: 2.61, 30: 2.84, 31: 2.88, 63: 3.5}
"""Acceptance lengths of an 8B target's head at contexts of 33k tokens."""

FAR = {15: 10.9, 30: 12.3, 31: 14.4, 63: 19.4}
"""Milliseconds at 4 requests there. Those of 30 and 63 nodes were measured, the others are guessed:
attention takes longer for more rows."""

FAR_TOLD = {15: 6.8, 30: 6.4, 31: 8.6, 63: 8.2}
"""What the start measured, without contexts."""

FAR_CONTEXT = 33_000
ALIKE_MS = 4.0
"""What such contexts take where they take as long for any number of nodes."""


@dataclass(frozen=True)
class World:
    """One batch size and text.

    Attributes:
        ms: milliseconds of a step without prompts, by number of nodes.
        told: what the start measured.
        lengths: mean tokens per step of a request.
        later: by what the time of all steps is multiplied from step `LATER` on.
        context: K/V tokens of each request.
        beside: fraction of steps with prompts, where 7 nodes are verified.
        other: the same batch with other contexts, which comes and goes every `TURN` steps.
    """

    batch: int
    ms: Mapping[int, float]
    told: Mapping[int, float]
    lengths: Mapping[int, float]
    emit: Callable[[int, float, random.Random], int]
    levels: Mapping[int, int]
    experts: bool = False
    later: float = 1.0
    context: int = 500
    beside: float = PROMPTS
    other: World | None = None

    def at(self, step: int) -> World:
        """Return the world of a step: this one, or the other."""
        return self.other if self.other and step // TURN % 2 else self

    def best(self) -> float:
        """Return tokens of a request per millisecond, with the best number of nodes."""
        return max(self.lengths[nodes] / self.mean_ms(nodes) for nodes in self.ms)

    def times(self, low: float, high: float, seed: int) -> World:
        """The same world, where each cost is told times a random factor."""
        rng = random.Random(seed)
        return replace(self, told={n: ms * rng.uniform(low, high) for n, ms in self.told.items()})

    def prompts(self, nodes: int) -> float:
        """Return the fraction of steps with a prompt, which is constant per token."""
        return min(1.0, self.beside * self.lengths[nodes] / self.lengths[7])

    def mean_ms(self, nodes: int) -> float:
        return self.ms[nodes] + self.prompts(nodes) * PROMPT_MS

    def tuner(self) -> NodeTuner:
        """Return a tuner that was told the costs."""
        numbers = sorted(self.ms)
        schedule = [0, *numbers, *[numbers[-1]] * self.batch]
        sizes = request_counts(self.batch)
        levels = dict(self.levels)
        tuner = NodeTuner(schedule, 1 << 20, sizes, levels, experts=self.experts)
        tuner.seed({nodes: {self.batch: ms / 1e3} for nodes, ms in self.told.items()})
        return tuner


def qwen(batch: int, *, right: bool) -> World:
    """The dense target, at 4 or 16 requests, with right costs or those that were measured."""
    ms, wrong = {4: (FOUR, FOUR_WRONG), 16: (SIXTEEN, SIXTEEN_WRONG)}[batch]
    actual = {nodes: each + OTHER_MS for nodes, each in ms.items()}
    return _world(batch, actual, ms if right else wrong, LENGTHS)


def far(*, rows: bool = True, near: bool = False) -> World:
    """A target at contexts of 33k tokens."""
    short = {nodes: ms + OTHER_MS for nodes, ms in FAR_TOLD.items()}
    ms = FAR if rows else {nodes: each + ALIKE_MS for nodes, each in short.items()}
    # Steps with prompts verify 7 nodes.
    lengths = {7: 2.2, **FAR_LENGTHS}
    world = replace(_world(4, ms, FAR_TOLD, lengths), context=FAR_CONTEXT)
    return replace(world, ms=short, context=World.context, other=world) if near else world


def _world(
    batch: int, ms: Mapping[int, float], told: Mapping[int, float], lengths: Mapping[int, float]
) -> World:
    """A batch whose requests follow each level with the chance that gives the mean lengths."""
    chances = {nodes: followed(shape(nodes).steps, mean) for nodes, mean in lengths.items()}

    def emit(nodes: int, offset: float, rng: random.Random) -> int:
        return drawn(shape(nodes).steps, kept(chances[nodes] + offset), rng) if nodes else 1

    levels = {nodes: shape(nodes).steps for nodes in ms if nodes}
    return World(batch, ms, told, {0: 1.0, **lengths}, emit, levels)


@functools.cache
def dense(
    text: str | float,
    batch: int,
    *,
    beside: float = PROMPTS,
    more: float = 0.0,
    part: float = 1.0,
    host: float = 0.0,
) -> World:
    """A target of 8B, or one that takes a part of its time.

    Args:
        more: milliseconds that steps take longer, for contexts or prompts.
        host: least milliseconds of a step, which the host takes.
    """
    numbers = [n for n in {0, *tuner_world.LENGTHS["0"]} if batch * (n + 1) <= tuner_world.MAX_ROWS]
    told = {nodes: part * tuner_world.graph_ms(batch, nodes) for nodes in numbers}
    return World(
        batch,
        {nodes: max(host, ms + OTHER_MS + more) for nodes, ms in told.items()},
        told,
        {nodes: tuner_world.mean_length(text, nodes) for nodes in {*numbers, 7}},
        functools.partial(tuner_world.emit, text),
        {nodes: shape(nodes).steps for nodes in numbers if nodes},
        beside=beside,
    )


def experts(
    text: str,
    batch: int,
    slope: float = 1.0,
    *,
    ladder: Ladder = NARROW,
    beside: float = PROMPTS,
    known: bool = True,
) -> World:
    """A target with experts, whose costs are told times a slope, and that it has any if `known`."""
    numbers = sorted(moe_world.numbers(ladder))
    return World(
        batch,
        {nodes: moe_world.step_ms(batch, nodes, ladder) for nodes in numbers},
        {nodes: moe_world.told_ms(batch, nodes, slope, ladder) for nodes in numbers},
        {nodes: moe_world.mean_length(text, nodes, ladder) for nodes in {*numbers, 7}},
        functools.partial(moe_world.emit, text, ladder=ladder),
        {nodes: moe_world.shape_of(nodes, ladder).steps for nodes in numbers if nodes},
        experts=known,
        beside=beside,
    )


def shares(
    world: World | Sequence[World],
    marks: Sequence[int],
    seed: int,
    tuner: NodeTuner | None = None,
    *,
    told: bool = True,
) -> list[float]:
    """Serve batches; return throughput over that of the best number, exploration included.

    Args:
        world: of all steps, or of each.
        marks: steps that end what each share is of.
        tuner: chooses; one that was told the world's costs unless it is given.
        told: whether the tuner is told of contexts.
    """
    worlds = [world] * marks[-1] if isinstance(world, World) else world
    rng, tuner = random.Random(seed), tuner or worlds[0].tuner()
    most = max(each.batch for each in worlds)
    offsets, left = [0.0] * most, [0] * most
    verified = previous = -1
    disturbed, found = 0, []
    least = spent = 0.0
    for step in range(marks[-1]):
        here = worlds[step].at(step)
        drafting = tuner.begin_step(here.batch)
        # A larger batch cuts what an earlier step has drafted.
        verified = drafting if verified not in here.ms else verified
        factor = here.later if step >= LATER else 1.0
        beside = rng.random() < here.prompts(verified)
        ms = factor * here.ms[verified] * rng.gauss(1.0, NOISE)
        ms += beside * (1.5 + rng.expovariate(1 / 8))
        if rng.random() < HICCUPS:
            disturbed = 10
        if disturbed:
            disturbed, ms = disturbed - 1, ms + rng.uniform(1, 6)
        emitted = []
        for slot in range(here.batch):
            if left[slot] <= 0:
                offsets[slot], left[slot] = SPREAD * rng.gauss(0, 1), TOKENS
            emitted.append(here.emit(verified, offsets[slot], rng))
            left[slot] -= emitted[-1]
        tuner.observe(
            verified,
            emitted,
            ms / 1e3 if previous == verified == drafting else None,
            batch=here.batch,
            prompts=110 * beside,
            context=here.batch * here.context * told,
        )
        least += here.lengths[verified] / here.best()
        spent += here.mean_ms(verified)
        previous, verified = verified, drafting
        if step + 1 in marks:
            found.append(least / spent)
            least = spent = 0.0
    return found
