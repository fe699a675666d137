"""What a search has found, as lines and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.products.findings import FoundProduct, FoundRows

GO_PRODUCT = 59 / 66
"""Share of cuBLAS' time of gate_up in the chain that is worth a kernel of our own."""

GO_LAYER = 0.95
"""Share of cuBLAS' time of a layer that is."""

SHOWN = 3
"""Plans that are shown of a product."""


def lines(found: FoundRows) -> list[str]:
    """A table of arms, then one of products."""
    said = [f"== {found.rows} rows: a copy of the weights of a layer takes {found.floor:.1f} us"]
    base = found.arms.get("cublas", float("nan"))
    for name, us in found.arms.items():
        said.append(
            f"  {name:24} {us:7.2f} us a layer, {us / base:.3f} of cublas, "
            f"{us / found.floor if found.floor else float('nan'):.2f} of the copy, "
            f"error {found.errors.get(name, float('nan')):.4f}"
            + ("" if found.same.get(name) else ", REPLAYS DIFFER")
        )
    said += [f"  {found.note}"] if found.note else []
    for each in found.products.values():
        said += product_lines(each)
    return [*said, verdict(found)]


def product_lines(found: FoundProduct) -> list[str]:
    """What a product takes in the chain, by cuBLAS and by the best plans."""
    own = found.in_chain(None)
    said = [
        f"  {found.product.name}: cublas {own:.2f} us in the chain "
        f"({found.cublas - found.cublas_overlapped:+.2f} saved by overlapped small kernels), "
        f"{len(found.tried)} plans"
    ]
    for overlapped in (True, False):
        for each in found.ranked(overlapped=overlapped)[:SHOWN]:
            assert each.plan is not None
            said.append(
                f"    {found.in_chain(each):7.2f} us {found.in_chain(each) / own:.3f} "
                f"{each.plan.short}"
            )
    for failure, count in failures(found).items():
        said.append(f"    {count} failed: {failure}")
    return said


def failures(found: FoundProduct) -> dict[str, int]:
    """How many plans failed in each way; errors of results count as one way."""
    counts: dict[str, int] = {}
    for each in found.tried:
        if each.failure:
            what = each.failure if not each.failure.startswith("relative") else "relative error"
            line = what.splitlines()[0][:160]
            counts[line] = counts.get(line, 0) + 1
    return counts


def verdict(found: FoundRows) -> str:
    """Whether it is worth to go on, by gate_up in the chain or by the layer."""
    base = found.arms.get("cublas")
    ours = {
        name: us
        for name, us in found.arms.items()
        if name.startswith(("ours+", "winners")) and found.same.get(name)
    }
    gate_up = found.products.get("gate_up")
    best = next(iter(gate_up.ranked(overlapped=True)), None) if gate_up else None
    if not base or not ours or gate_up is None or best is None:
        return f"  {found.rows} rows: nothing to decide by"
    name = min(ours, key=lambda each: ours[each])
    layer, product = ours[name] / base, gate_up.in_chain(best) / gate_up.in_chain(None)
    go = layer <= GO_LAYER or product < GO_PRODUCT
    return (
        f"  {found.rows} rows: {'GO' if go else 'no go'}: gate_up {gate_up.in_chain(None):.1f} -> "
        f"{gate_up.in_chain(best):.1f} us, layer {base:.1f} -> {ours[name]:.1f} us ({name})"
    )


def write(file: Path | None, about: dict[str, Any], found: list[FoundRows]) -> None:
    """Write all results, if there is a file for them."""
    if file is not None:
        plain = {**about, "rows": [each.plain() for each in found]}
        file.write_text(json.dumps(plain, indent=1) + "\n")
