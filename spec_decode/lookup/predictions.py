"""What a request says its answer will be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

KEY = "graft_prediction"
"""The key of ``SamplingParams.extra_args``, which are ``vllm_xargs`` in a request over HTTP."""


class Wrong(NamedTuple):
    """A prediction that can't be used.

    Attributes:
        reason: a sentence on why not, and what to send instead.
    """

    reason: str


def prediction_of(params: SamplingParams, vocab_size: int) -> str | list[int] | Wrong | None:
    """What a request predicts: a text, or token ids of the target; None if it says nothing.

    Args:
        params: the request's parameters.
        vocab_size: tokens of the target.
    """
    given = (params.extra_args or {}).get(KEY)
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        return Wrong(f"it is a {type(given).__name__}: send a text, or a list of token ids.")
    wrong = (each for each in given if type(each) is not int or not 0 <= each < vocab_size)
    if (first := next(wrong, None)) is not None:
        return Wrong(
            f"{first!r} in it is no token id, which are integers from 0 to {vocab_size - 1}."
        )
    return given
