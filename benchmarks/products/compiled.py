"""What the compiled code of a product does before its wait for the kernel before."""

from __future__ import annotations

import re
from typing import NamedTuple

WAIT = "griddepcontrol.wait"

LOADS = {
    "copies": re.compile(r"\bcp\.async\.c[ag]\.shared\.global\b"),
    "prefetches": re.compile(r"\bcp\.async\.bulk\.prefetch\.L2\.global\b"),
    "loads": re.compile(r"\bld\.global\b"),
    "writes": re.compile(r"\b(st\.global|atom\.global|red\.global)\b"),
}
"""Instructions by which a kernel touches memory."""

MACHINE_WAIT = "ACQBULK"

MACHINE_LOADS = {
    "copies": re.compile(r"\bLDGSTS\b"),
    "prefetches": re.compile(r"\bUBLKPF\b"),
    "loads": re.compile(r"\b(LDG|LD)\."),
    "writes": re.compile(r"\b(STG|ST|ATOMG?|RED)\."),
}
"""The same in machine code of sm_90."""


class Order(NamedTuple):
    """How often each kind of instruction stands before the wait, and after it."""

    before: dict[str, int]
    after: dict[str, int]


def order_of(code: str, *, machine: bool = False) -> Order | None:
    """What stands before and after the only wait of a kernel's PTX or machine code.

    Returns:
        The order in the text, in which both come without jumps up to the wait; None without a wait.

    Raises:
        ValueError: there are several waits.
    """
    wait, kinds = (MACHINE_WAIT, MACHINE_LOADS) if machine else (WAIT, LOADS)
    parts = code.split(wait)
    if len(parts) == 1:
        return None
    if len(parts) > 2:
        raise ValueError(f"{len(parts) - 1} waits for the kernel before")
    before, after = (
        {name: len(kind.findall(part)) for name, kind in kinds.items()} for part in parts
    )
    return Order(before, after)
