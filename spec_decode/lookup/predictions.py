"""What a request says its answer will be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_graft.base.values import shown
from vllm_graft.spec_decode.trees.reference import KEY

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


class Wrong(NamedTuple):
    """A prediction that can't be used.

    Attributes:
        reason: a sentence on why not, and what to send instead.
    """

    reason: str


class Predicted(NamedTuple):
    """A prediction that can be used.

    Attributes:
        given: the text, or token ids of the target.
        is_cut: whether some of it was left out.
    """

    given: str | list[int]
    is_cut: bool


def prediction_of(params: SamplingParams, vocab_size: int, room: int) -> Predicted | Wrong | None:
    """What a request predicts; None if it says nothing.

    Args:
        params: the request's parameters.
        vocab_size: tokens of the target.
        room: most ids that are looked at.
    """
    given = (params.extra_args or {}).get(KEY)
    if given is None or given in ("", []):
        return None
    if isinstance(given, str):
        return Predicted(given, is_cut=False)
    if not isinstance(given, list):
        return Wrong(f"it is a {type(given).__name__}: send a text, or a list of token ids.")
    kept = given[:room]
    wrong = (each for each in kept if type(each) is not int or not 0 <= each < vocab_size)
    if (first := next(wrong, None)) is not None:
        # What is no number may be as long as a request.
        said = shown(first) if type(first) is int else f"a {type(first).__name__}"
        return Wrong(f"{said} in it is no token id, which are integers from 0 to {vocab_size - 1}.")
    return Predicted(kept, is_cut=len(kept) < len(given))
