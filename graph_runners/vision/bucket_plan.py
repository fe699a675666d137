"""The buckets that a tower gets."""

import math
from collections.abc import Sequence

from vllm_graft.graph_runners.vision.towers.tower import Tower
from vllm_graft.graph_runners.vision.vision_config import VitConfig

DEFAULT_MAX_PATCHES = 4096
"""Patches of the largest bucket where it is not measured what pays."""

MOST_PATCHES = 8192
"""Patches of the largest bucket that is tried where it is measured what pays."""

SMALLEST_BUCKET = 128
"""Patches of the smallest bucket."""

_WIDEST_STEP, _MOST_STEPS = 128, 32
"""Patches between two buckets, and the number of such steps below `DEFAULT_MAX_PATCHES`. Matrix
products are cut into tiles of 128 rows, so a bucket in between would not be faster. The steps are
wider if so many do not reach the largest bucket."""

_WIDE_STEP = 256
"""Patches between two buckets above `DEFAULT_MAX_PATCHES`."""


def plan_buckets(
    tower: Tower, options: VitConfig, budgets: Sequence[int], measured: bool = True
) -> list[int]:
    """Patches of the buckets to capture, ascending; none for a tower whose `unit` is 0. They come
    from our options, else from `budgets`, vLLM's ``encoder_cudagraph_token_budgets`` in embeddings,
    else from :func:`bucket_sizes`. If `measured`, a bucket that does not pay is dropped."""
    unit = tower.unit
    if not unit:
        return []
    if options.buckets is not None:
        chosen = [-(-rows // unit) * unit for rows in options.buckets]
    elif budgets:
        chosen = [tokens * unit for tokens in budgets]
    else:
        return _default_buckets(unit, options.max_patches, measured)
    most = options.max_patches or max(chosen, default=0)
    return sorted({rows for rows in chosen if 0 < rows <= most})


def _default_buckets(unit: int, max_patches: int | None, measured: bool) -> list[int]:
    largest = max_patches or DEFAULT_MAX_PATCHES
    widest = max(_WIDEST_STEP, largest / _MOST_STEPS)
    step = math.lcm(unit, 64)
    sizes = bucket_sizes(SMALLEST_BUCKET, largest, step, widest=widest)
    if max_patches or not measured:
        return sizes
    wide = range(largest + _WIDE_STEP, MOST_PATCHES + 1, _WIDE_STEP)
    return sorted({*sizes, *(rows // step * step for rows in wide)})


def bucket_sizes(
    smallest: int, largest: int, unit: int, growth: float = 1.25, widest: float = math.inf
) -> list[int]:
    """Patches of the buckets, ascending, all multiples of `unit`. Each bucket is at most `growth`
    times as large as the one before, and at most about `widest` patches larger. So a batch is
    padded by at most ``growth - 1`` of its rows."""
    sizes: list[int] = []
    size = float(smallest)
    while size < largest:
        rounded = -(-int(size) // unit) * unit
        if rounded < largest and (not sizes or rounded > sizes[-1]):
            sizes.append(rounded)
        size = min(size * growth, size + widest)
    top = largest // unit * unit
    if top and (not sizes or top > sizes[-1]):
        sizes.append(top)
    return sizes
