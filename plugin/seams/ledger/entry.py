"""One entry of the ledger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["class", "call", "def", "source", "order", "has", "name", "module"]


@dataclass(frozen=True)
class Seam:
    """One upstream symbol.

    Attributes:
        part: who needs it: ``core``, ``tree``, ``draft``, ``vit``, ``fused``, ``pixtral``,
            ``phi4mm``, ``hicache``, ``native`` (our parts of the host KV cache in vLLM's own
            connector), ``bench``, ``testing``.
        path: dotted path, below ``vllm.``.
        kind: how it is compared. ``class``: the names of its bases; ``call``: parameter names,
            ``=`` after those with a default; ``def``: the same, read from the file of a module that
            cannot be imported everywhere; ``source``: hash of its source, where we rely on
            what the body does; ``order``: texts that its source holds in this order; ``has``:
            members, fields or attributes of a class that we read; ``name``: it exists;
            ``module``: it is there, and is not imported to look.
        expected: what ``kind`` yields on a vLLM that we know.
        why: what we do with it.
        until: what would make it unnecessary.
    """

    part: str
    path: str
    kind: Kind
    expected: str
    why: str
    until: str
