"""The reference of a request, as it travels to the workers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

KEY = "graft_prediction"
"""The key of ``SamplingParams.extra_args``, which are ``vllm_xargs`` in a request over HTTP."""


class Owner(NamedTuple):
    """Whose text a request's is in a memory: numbers of 63 bits, 0 for nobody, whose text is not
    kept and finds nothing.

    Attributes:
        scope: requests of one scope read each other's texts, and nobody else's.
        prompt: requests with the same prompt have the same one.
    """

    scope: int
    prompt: int


NOBODY = Owner(0, 0)


class Reference(NamedTuple):
    """What is known beforehand of a request's answer.

    The engine core puts it in the place of the prediction in the request's parameters, so that all
    ranks get the same one with the request. No request can hold one itself: JSON has no such type.

    Attributes:
        row: int32 tokens with a `BORDER` between pieces, the likeliest piece at the end.
        tokens: tokens by source, for the metrics.
        declines: reasons why there is none, or not all of it.
        teaches: whether what is learned from texts may count this request's.
        owner: whose text the request's is in a memory.
    """

    row: Sequence[int] = array("i")
    tokens: Mapping[str, int] = {}
    declines: tuple[str, ...] = ()
    teaches: bool = True
    owner: Owner = NOBODY


NONE = Reference()
UNREAD = Reference(declines=("off",))
"""Stands for the prediction of a request where nothing reads it."""


def reference_in(params: SamplingParams | None) -> Reference:
    """The reference that came with a request's parameters."""
    found = None if params is None else (params.extra_args or {}).get(KEY)
    return found if isinstance(found, Reference) else NONE
