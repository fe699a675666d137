"""The reference of a request, as it travels to the workers."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_graft.spec_decode.counts.tree_metrics import REFERENCE_DECLINES, REFERENCE_SOURCES
from vllm_graft.spec_decode.lookup.predictions import KEY

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_graft.base.metric import Numbers


class Reference(NamedTuple):
    """What is known beforehand of a request's answer.

    The engine core makes it and puts it in the place of the prediction in the request's
    parameters, so that all ranks get the same one with the request. No request can hold one
    itself: JSON has no such type.

    Attributes:
        row: int32 tokens with a `BORDER` between pieces, the likeliest piece at the end.
        tokens: tokens by source, for the metrics.
        declines: reasons why there is none, or not all of it.
    """

    row: Sequence[int] = array("i")
    tokens: Mapping[str, int] = {}
    declines: tuple[str, ...] = ()


NONE = Reference()
UNREAD = Reference(declines=("off",))
"""Stands for the prediction of a request where nothing reads it."""


def reference_in(params: SamplingParams | None) -> Reference:
    """The reference that came with a request's parameters."""
    found = None if params is None else (params.extra_args or {}).get(KEY)
    return found if isinstance(found, Reference) else NONE


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
