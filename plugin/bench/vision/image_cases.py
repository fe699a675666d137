"""Inputs of the towers: sizes, streams and random batches, as grids of patches."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Grid = tuple[int, int, int]
"""Frames (after temporal merging), rows and columns of patches."""

Modality = Literal["image", "video"]

RATIOS = (1.0, 4 / 3, 3 / 4, 16 / 9, 9 / 16)
SIZES = (224, 336, 448, 560, 672, 896, 1120, 1344)


@dataclass(frozen=True)
class Batch:
    """The input of one call of the encoder.

    Attributes:
        modality: modality of all items.
        grids: one grid per item.
        kind: the sort of case, for counting.
    """

    modality: Modality
    grids: tuple[Grid, ...]
    kind: str = "image"

    @property
    def patches(self) -> int:
        """Patches of all items."""
        return sum(math.prod(grid) for grid in self.grids)


def image(height: int, width: int, patch: int, merge: int = 2) -> Grid:
    """Return the grid of an image: its size is rounded to whole merged patches, as processors do.

    Args:
        height: height of the image, in pixels.
        width: width of the image, in pixels.
        patch: edge of a patch, in pixels.
        merge: patches that are merged into one token, along an edge.
    """
    unit = patch * merge
    rows, columns = (max(1, round(edge / unit)) * merge for edge in (height, width))
    return 1, rows, columns


def single_sizes(patch: int, sizes: tuple[int, ...] = SIZES) -> dict[str, Batch]:
    """Make a batch of one square image for each size."""
    return {f"{size} px": Batch("image", (image(size, size, patch),)) for size in sizes}


def several(patch: int, counts: tuple[int, ...] = (4, 20), size: int = 336) -> dict[str, Batch]:
    """Make a batch of several images of one size."""
    grid = image(size, size, patch)
    return {f"{count} x {size} px": Batch("image", (grid,) * count) for count in counts}


def natural_stream(
    patch: int, requests: int, grids: int = 200, seed: int = 0, largest: int = 1792
) -> list[Batch]:
    """Draw requests of one image each, of sizes that users send.

    ``grids`` distinct grids are drawn: the area is log-normal around 448 x 448 pixels (sigma 0.9),
    and the aspect ratio is one of five. The grid of rank r is requested with weight 1 / r.

    Args:
        patch: edge of a patch, in pixels.
        requests: length of the stream.
        grids: how many distinct grids there are.
        seed: the seed of the draws.
        largest: longest edge, in pixels.
    """
    draw = random.Random(seed)
    distinct: dict[Grid, None] = {}
    # Small towers have fewer distinct grids than that.
    for _ in range(grids * 50):
        if len(distinct) == grids:
            break
        area, ratio = draw.lognormvariate(2 * math.log(448), 0.9), draw.choice(RATIOS)
        height, width = (min(largest, math.sqrt(area * r)) for r in (ratio, 1 / ratio))
        distinct[image(int(height), int(width), patch)] = None
    known = list(distinct)
    weights = [1 / rank for rank in range(1, len(known) + 1)]
    return [Batch("image", (grid,)) for grid in draw.choices(known, weights, k=requests)]


def matrix(count: int, patch: int, cap: int = 8192, seed: int = 0) -> Iterator[Batch]:
    """Draw random batches of every sort that went wrong somewhere.

    There are single images and groups of one grid (which come back often enough to be captured),
    mixed grids, pairs of batches with equal S (patches in all) and different segmentation, videos
    of 1 to 200 frames, and totals of every length, so that every tail of a bucket occurs.

    Args:
        count: how many batches.
        patch: edge of a patch, in pixels.
        cap: largest number of patches of a batch.
        seed: the seed of the draws.
    """
    draw = random.Random(seed)
    popular = [image(draw.choice(SIZES[:5]), draw.choice(SIZES[:5]), patch) for _ in range(12)]
    made = 0
    while made < count:
        for batch in _some(draw, popular):
            if batch.patches <= cap and made < count:
                made += 1
                yield batch


def _some(draw: random.Random, popular: list[Grid]) -> list[Batch]:
    """Draw the next batch, or several batches that belong together."""
    kind = draw.choice(("one", "one", "group", "mixed", "segments", "video", "tail"))
    if kind == "one":
        return [Batch("image", (draw.choice(popular),), kind)]
    if kind == "group":
        return [Batch("image", (draw.choice(popular[:4]),) * draw.choice((2, 3, 4, 5, 8)), kind)]
    if kind == "mixed":
        return [Batch("image", tuple(_any(draw) for _ in range(draw.randint(2, 9))), kind)]
    if kind == "segments":
        return _equal_length(draw)
    if kind == "video":
        frames = draw.choice((draw.randint(1, 16), draw.randint(1, 200)))
        grid = frames, 2 * draw.randint(2, 6), 2 * draw.randint(2, 6)
        return [Batch("video", (grid,) * draw.choice((1, 1, 1, 2)), kind)]
    return [Batch("image", ((1, 2, 2 * draw.randint(1, 512)),), kind)]


def _any(draw: random.Random) -> Grid:
    return 1, 2 * draw.randint(1, 24), 2 * draw.randint(1, 24)


def _equal_length(draw: random.Random) -> list[Batch]:
    """Draw three batches of the same S: three images, these reversed, and one image."""
    rows, columns = 2 * draw.randint(2, 8), [2 * draw.randint(1, 12) for _ in range(3)]
    cut = [(1, rows, width) for width in columns]
    return [
        Batch("image", tuple(cut), "segments"),
        Batch("image", tuple(reversed(cut)), "segments"),
        Batch("image", ((1, rows, sum(columns)),), "segments"),
    ]
