"""Counts the references of requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from vllm_graft.spec_decode.counts.tree_metrics import REFERENCE_DECLINES, REFERENCE_SOURCES

if TYPE_CHECKING:
    from vllm_graft.base.metric import Numbers
    from vllm_graft.spec_decode.trees.reference import Reference


class ReferenceCounts:
    """Counts the references of an engine's requests, for the metrics."""

    def __init__(self) -> None:
        self.tokens = Counter(dict.fromkeys(REFERENCE_SOURCES, 0))
        self.declines = Counter(dict.fromkeys(REFERENCE_DECLINES, 0))

    def add(self, reference: Reference) -> None:
        """Count one."""
        self.tokens.update(reference.tokens)
        self.declines.update(reference.declines)

    def numbers(self) -> Numbers:
        """The numbers of the metrics."""
        return {"reference_tokens": dict(self.tokens), "reference_declines": dict(self.declines)}
