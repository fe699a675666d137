"""Plans that are worth to be timed, by sizes alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch

from vllm_graft.spec_decode.kernels.attention.attention_plan import (
    Plan,
    Sizes,
    Tile,
    shared_bytes,
    staged_plan,
)
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2

SHARED_BYTES = 220 << 10
"""Shared memory that a program may take, of 227 KiB on sm_90."""

ITEM = 2
"""Bytes of a number in the cache."""


def tiles(sizes: Sizes) -> list[Tile]:
    """Tiles whose accumulators fit into registers, and whose stages fit into shared memory."""
    rows = max(16, next_power_of_2(sizes.rows))
    # Two tiles of a head of 128 read the keys twice, four are out of the question.
    heights = [64, 128] if rows >= 128 and sizes.head <= 128 else [32, 64]
    found = []
    for height, keys, warps, stages in itertools.product(
        dict.fromkeys(min(rows, most) for most in heights), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4)
    ):
        numbers, held = height * sizes.head, 2 * keys * sizes.head * ITEM
        if numbers > 128 * 32 * warps or (warps == 8 and numbers < 64 * 128):
            continue
        if not 32 * 128 <= keys * sizes.head <= 128 * 128 or (stages == 4 and keys > 32):
            continue
        # One stage holds keys and values in registers, others in shared memory.
        if stages == 1 and held > 160 * 4 * 32 * warps:
            continue
        tile = Tile(height, keys, warps, stages)
        if shared_bytes(tile, sizes.head, ITEM) <= SHARED_BYTES:
            found.append(tile)
    return found


def splits(sizes: Sizes, tile: Tile) -> list[int]:
    """Numbers of splits that give multiprocessors up to four programs each, and 32 keys each."""
    programs = sizes.programs(tile)
    useful = min(sizes.most_splits, cdiv(sizes.keys, max(tile.keys, 32)))
    wanted = {1}
    for share in (0.5, 1, 2, 4):
        wanted.add(round(share * sizes.multiprocessors / programs))
    # With one program on each multiprocessor already, two or three splits hide waits.
    wanted |= {2, 3} if programs <= 2 * sizes.multiprocessors else set()
    found = sorted(min(each, useful) for each in wanted if each >= 1)
    # One program for all of a long context is out of the question.
    least = 4 if programs * 4 < sizes.multiprocessors and useful >= 8 else 1
    return [each for each in dict.fromkeys(found) if each >= least]


def first_plans(sizes: Sizes, *, overlapped: bool) -> list[Plan]:
    """Make plans of all tiles and splits, combined in the one way that is expected to be fast.

    Args:
        sizes: what is computed.
        overlapped: whether the device can launch a kernel while another runs.
    """
    plans = [
        staged_plan(sizes, tile, count) for tile in tiles(sizes) for count in splits(sizes, tile)
    ]
    return plans if overlapped else [plan._replace(overlapped=False) for plan in plans]


def later_plans(best: Plan) -> list[Plan]:
    """The best plan with one thing changed at a time."""
    changes: list[dict[str, object]] = [{"ahead": not best.ahead}]
    changes += [{"edges": False}] if best.edges else []
    if best.splits > 1:
        warps, width = best.combine_warps, best.combine_width
        changes += [
            {"combine_warps": min(8, 2 * warps)},
            {"combine_warps": max(1, warps // 2)},
            {"combine_width": width // 2},
            {"combine_width": width // 2, "combine_warps": max(1, warps // 2)},
            {"partials": torch.float16},
            {"partials": torch.bfloat16},
            {"partials": torch.float16, "combine_warps": max(1, warps // 2)},
            {"skip_empty": False},
        ]
        if best.overlapped:
            changes.append({"overlapped": False})
    changed = [best._replace(**change) for change in changes]  # type: ignore[arg-type]
    return [plan for plan in distinct(changed) if plan != best]


def plain(plan: Plan) -> dict[str, object]:
    """A plan as plain values, for JSON."""
    return {
        **plan._asdict(),
        "tile": list(plan.tile),
        "partials": str(plan.partials).removeprefix("torch."),
    }


def short(plan: Plan) -> str:
    """A plan in a few letters: rows x keys, warps, stages, splits, and what is switched on."""
    tile = plan.tile
    words = [f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages}", f"/{plan.splits}"]
    words += ["ahead"] if plan.ahead else []
    words += ["edges"] if plan.edges else []
    if plan.splits > 1:
        words += ["skip"] if plan.skip_empty else []
        words += ["pdl"] if plan.overlapped else []
        words += [f"c{plan.combine_warps}" + f"x{plan.combine_width}" * (plan.combine_width > 0)]
        words += [] if plan.partials == torch.float32 else [str(plan.partials)[6:]]
    return " ".join(words)


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Plans without repetitions, in order."""
    return list(dict.fromkeys(plans))
