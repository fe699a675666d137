"""The tables of a run, and what they say of the aims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.attention.rows import Row
from vllm_graft.base.text_table import markdown

AIM, LEAST_CONTEXT = 1.25, 2048
"""Tree attention's time over the platform's is to be at most this, from so many keys on."""

NEAR, FAR = 1024, 32768
"""A window's layer is to be no slower at the second context than at the first."""

HEADS = (
    "shape", "layer", "batch", "context", "ours us", "kernel", "platform us", "its kernel",
    "ratio", "to the fastest", "one row us", "MB", "of a copy's rate", "difference",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row as the table shows it; what did not run is a dash."""
    others = [f"{name} {time:.1f}" for name, time in list(row.platform.items())[1:]]
    theirs = _shown(row.platform.get(row.taken))
    return [
        row.shape,
        row.layer,
        str(row.batch),
        str(row.context),
        _shown(row.ours),
        row.chosen,
        "; ".join([theirs, *others]),
        row.taken or "-",
        _shown(row.ratio, ".2f"),
        _shown(row.ratio_of_best, ".2f"),
        _shown(row.one_row.get(row.taken)),
        f"{row.bytes / 1e6:.1f}",
        _shown(row.share, ".0%"),
        _shown(max(row.differences.values(), default=None), ".3f"),
    ]


def table(rows: Sequence[Row]) -> str:
    """Lay out all rows in Markdown."""
    return markdown(HEADS, [cells(row) for row in rows])


def windows(rows: Iterable[Row]) -> list[tuple[Row, Row, float]]:
    """Pairs of a window layer's rows at `NEAR` and `FAR`, and our time at the second over that."""
    found = {(row.shape, row.layer, row.batch, row.context): row for row in rows}
    pairs = []
    for (shape, layer, batch, context), near in found.items():
        far = found.get((shape, layer, batch, FAR))
        if not layer.startswith("window") or context != NEAR or far is None:
            continue
        if near.ours is not None and far.ours is not None:
            pairs.append((near, far, far.ours / near.ours))
    return pairs


def verdicts(rows: Sequence[Row]) -> list[str]:
    """A line for each kind of layer: its worst ratio, and what a longer context costs a window."""
    lines = []
    for key in dict.fromkeys((row.shape, row.layer) for row in rows):
        own = [row for row in rows if (row.shape, row.layer) == key]
        name = ", ".join(key)
        known = [row for row in own if row.context >= LEAST_CONTEXT and row.ratio is not None]
        missing = sum(row.ratio is None for row in own)
        if known:
            worst = max(known, key=lambda row: row.ratio or 0.0)
            lines.append(
                f"{name}: at worst {worst.ratio:.2f} of {worst.taken}, at batch {worst.batch} and "
                f"{worst.context} keys (aim {AIM})"
            )
        if missing:
            lines.append(f"{name}: {missing} of {len(own)} sizes have no ratio, see the errors")
    for near, far, ratio in windows(rows):
        lines.append(
            f"{near.shape}, {near.layer}, batch {near.batch}: {far.ours:.1f} us at {FAR} keys, "
            f"{near.ours:.1f} at {NEAR}: {ratio:.2f} (aim 1)"
        )
    return lines


def failures(rows: Iterable[Row]) -> list[str]:
    """A line for each different error, with the sizes at which it came up."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for kernel, error in row.failures.items():
            key = (f"{row.shape}, {row.layer}", kernel, error)
            places.setdefault(key, []).append(f"{row.batch}x{row.context}")
    return [
        f"{layer}: {kernel} did not run at {', '.join(sizes)}: {error}"
        for (layer, kernel, error), sizes in places.items()
    ]


def _shown(value: float | None, form: str = ".1f") -> str:
    return "-" if value is None else format(value, form)
