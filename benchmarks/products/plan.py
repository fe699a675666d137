"""How a skinny product is computed, and which ways are worth to be timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.products.shapes import ITEM, Product

SHARED_BYTES = 220 << 10
"""Shared memory that all programs on a multiprocessor may take, of 227 KiB on sm_90."""

PARTIAL_BYTES = 128 << 20
"""Most bytes of partial tiles."""

MOST_AHEAD = 256 << 10
"""Most bytes of weights that a multiprocessor's programs let L2 load before the wait."""


class Plan(NamedTuple):
    """How a product is computed.

    Attributes:
        deep: whether stages are filled with weights before the wait (`deep_kernel`); otherwise
            Triton's own pipeline fills them after it (`tile_kernel`).
        tile: columns of the output, which are rows of the weights, that a program takes at a time.
        step: numbers of each that it multiplies at a time.
        stages: steps that are in shared memory at a time.
        warps: warps of a program.
        resident: programs of each multiprocessor, which share all steps equally; 0 gives each tile
            programs of its own.
        splits: programs of a tile, if `resident` is 0.
        flip: whether the weights are the tensor cores' first operand.
        overlapped: whether the kernel begins before the one before has ended.
        early: whether its successor may begin as soon as all programs of this one have begun.
        ahead: steps whose weights L2 loads before the wait, a power of 2 or 0. With `deep` they
            come after those that stages hold.
        roll: whether L2 goes on to load so many steps ahead.
    """

    deep: bool
    tile: int
    step: int
    stages: int
    warps: int
    resident: int = 0
    splits: int = 1
    flip: bool = True
    overlapped: bool = True
    early: bool = True
    ahead: int = 0
    roll: bool = False

    @property
    def kind(self) -> str:
        """``deep`` or ``tile``."""
        return "deep" if self.deep else "tile"

    @property
    def short(self) -> str:
        """The plan in a few letters."""
        words = [self.kind, f"{self.tile}x{self.step}"]
        words += [f"w{self.warps}", f"s{self.stages}"]
        words += [f"r{self.resident}"] if self.resident else [f"/{self.splits}"]
        words += [] if self.flip else ["mma"]
        if self.overlapped:
            words += ["pdl" if self.early else "pdl-late"]
            words += [f"a{self.ahead}" + ("+" if self.roll else "")] if self.ahead else []
        return " ".join(words)


class Grid(NamedTuple):
    """How the steps of a product are shared.

    Attributes:
        programs: how many programs there are.
        share: steps of each; the last may have fewer.
        slots: partial tiles in memory.
    """

    programs: int
    share: int
    slots: int


def padded_rows(plan: Plan, rows: int) -> int:
    """Rows of the activations that a kernel computes with: a power of 2."""
    least = 8 if plan.deep else 16
    return max(least, 1 << (rows - 1).bit_length())


def grid_of(plan: Plan, product: Product, multiprocessors: int) -> Grid:
    """How the steps of a product are shared."""
    steps = product.depth // plan.step
    total = product.columns // plan.tile * steps
    if plan.resident:
        share = -(-total // min(total, plan.resident * multiprocessors))
    else:
        share = -(-steps // plan.splits)
    programs = -(-total // share)
    return Grid(programs, share, 2 * programs if share % steps else 0)


def held_bytes(plan: Plan, rows: int) -> int:
    """Shared memory of a program's stages."""
    return plan.stages * (plan.tile + padded_rows(plan, rows)) * plan.step * ITEM


def fits(plan: Plan, product: Product, rows: int, multiprocessors: int) -> bool:
    """Whether a plan divides a product, and finds room for its stages, its sums and partials."""
    if product.columns % plan.tile or product.depth % plan.step:
        return False
    if plan.splits > product.depth // plan.step:
        return False
    padded = padded_rows(plan, rows)
    # A quarter of a thread's registers holds sums at most: with half, the compiler spills.
    if plan.tile * padded > 64 * 32 * plan.warps:
        return False
    if max(1, plan.resident) * (held_bytes(plan, rows) + 1024) > SHARED_BYTES:
        return False
    slots = grid_of(plan, product, multiprocessors).slots
    return slots * plan.tile * padded * 4 <= PARTIAL_BYTES


def _deep_plans(rows: int) -> Iterator[Plan]:
    for tile, step, resident in itertools.product((64, 128), (64, 128, 256), (0, 1, 2, 3)):
        for warps in (4,) if tile == 64 else (4, 8):
            if resident == 3 and tile == 128:
                continue
            one = Plan(True, tile, step, 1, warps, resident)
            # Two programs share a multiprocessor where each tile has its own.
            room = SHARED_BYTES // (resident or 2) - 1024
            stages = min(8, room // held_bytes(one, rows))
            if stages >= 3:
                yield one._replace(stages=stages)


def _tile_plans(rows: int) -> Iterator[Plan]:
    flips = [(True, tile) for tile in (64, 128)]
    flips += [(False, tile) for tile in (32, 64)] if rows <= 32 else []
    for (flip, tile), step, stages in itertools.product(flips, (64, 128, 256), (3, 4, 6)):
        warps = 8 if tile == 128 and rows > 64 else 4
        for splits in (1, 2):
            plan = Plan(False, tile, step, stages, warps, 0, splits, flip)
            if 64 << 10 <= 2 * held_bytes(plan, rows) <= SHARED_BYTES - 2048:
                yield plan


def ahead_of(plan: Plan, wanted: int) -> int:
    """Steps, a power of 2, whose weights take about so many bytes; 0 for less than one step."""
    steps = wanted // (plan.tile * plan.step * ITEM)
    return 1 << (steps.bit_length() - 1) if steps else 0


def first_plans(product: Product, rows: int, multiprocessors: int) -> list[Plan]:
    """Plans of all kinds with one or two amounts of weights that L2 loads before the wait."""
    deep, tile = list(_deep_plans(rows)), list(_tile_plans(rows))
    plans = [
        plan._replace(ahead=ahead_of(plan, wanted // (plan.resident or 2)))
        for wanted, kind in ((32 << 10, deep), (128 << 10, deep), (64 << 10, tile))
        for plan in kind
    ]
    return [plan for plan in distinct(plans) if fits(plan, product, rows, multiprocessors)]


def later_plans(best: Plan, product: Product, rows: int, multiprocessors: int) -> list[Plan]:
    """A plan with one thing changed at a time."""
    most = MOST_AHEAD // (best.tile * best.step * ITEM)
    changed = [best._replace(ahead=0, roll=False), best._replace(early=not best.early)]
    for ahead in (max(1, best.ahead * 4), max(1, best.ahead * 2), best.ahead // 2):
        if 0 < ahead <= max(1, most):
            changed.append(best._replace(ahead=ahead))
    if not best.deep and best.ahead:
        changed.append(best._replace(roll=not best.roll))
    stages = (best.stages - 1, best.stages + 1, best.stages // 2)
    changed += [best._replace(stages=each) for each in stages]
    if best.resident:
        changed += [best._replace(resident=best.resident + more) for more in (-1, 1)]
        changed.append(best._replace(resident=0, splits=1))
    else:
        changed += [best._replace(splits=best.splits * 2), best._replace(resident=1)]
        changed += [best._replace(resident=2), best._replace(resident=4)]
        changed += [best._replace(splits=best.splits // 2)] if best.splits > 1 else []
    return [
        plan
        for plan in distinct(changed)
        if plan != best and plan.stages >= 2 and fits(plan, product, rows, multiprocessors)
    ]


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Plans without repetitions, in order."""
    return list(dict.fromkeys(plans))
