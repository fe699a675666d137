"""One entry of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from vllm_graft.seams.ledger.minor import Minor

Kind = Literal["class", "call", "def", "source", "order", "has", "name", "module"]


@dataclass(frozen=True)
class Seam:
    """One upstream symbol.

    Attributes:
        part: who needs it: ``core``, ``tree``, ``mtp``, ``block``, ``draft``, ``vit``, ``fused``,
            ``pixtral``, ``phi4mm``, ``hicache``, ``native`` (our parts of the host KV cache in
            vLLM's own connector), ``metrics``, ``plan``, ``bench``, ``testing``.
        path: dotted path, below ``vllm.``.
        kind: how it is compared. ``class``: the names of its bases; ``call``: parameter names,
            ``=`` after those with a default; ``def``: the same, read from the file of a module that
            cannot be imported everywhere; ``source``: hash of its source, where we rely on
            what the body does; ``order``: texts that its source holds in this order; ``has``:
            members, fields or attributes of a class that we read; ``name``: it exists;
            ``module``: it is there, and is not imported to look.
        expected: what ``kind`` yields on the oldest vLLM that we know.
        why: what we do with it.
        until: what would make it unnecessary.
        later: from which minor version on vLLM has it otherwise, and how; the oldest first. Our
            code serves all of these forms.
        since: the minor version that brought it; an older vLLM is not asked for it.
    """

    part: str
    path: str
    kind: Kind
    expected: str
    why: str
    until: str
    later: tuple[tuple[Minor, str], ...] = ()
    since: Minor = (0, 0)

    def at(self, minor: Minor) -> Seam:
        """The entry with what a minor version of vLLM is expected to have."""
        known = [expected for since, expected in self.later if since <= minor]
        return replace(self, expected=known[-1], later=()) if known else replace(self, later=())
