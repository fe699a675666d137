"""Predictions of requests: what they say their answers will be."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag
from vllm_graft.base.values import shown
from vllm_graft.spec_decode.trees.reference import KEY

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.base.metric import Numbers


class Wrong(NamedTuple):
    """A prediction that can't be used, and the sentence on why not and what to send instead."""

    reason: str


class Predicted(NamedTuple):
    """A prediction that can be used: a text or token ids, and whether some of it was left out."""

    given: str | list[int]
    is_cut: bool


def prediction_of(params: SamplingParams, vocab_size: int, room: int) -> Predicted | Wrong | None:
    """The prediction of a request, of which at most `room` ids are looked at; None if it has
    none."""
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


class UnreadPredictions:
    """A `TextWatch` of an engine without n-grams, or without room for references: it counts."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, req_states: RequestState) -> None:
        """Do nothing: texts are not read."""

    def begin(self, req_index: int, request: NewRequestData) -> None:
        params = request.sampling_params
        if params is not None and KEY in (params.extra_args or {}):
            self.count += 1
            warning_once(
                f"a request's {KEY} is not used: set {flag('tree', 'ngram')}, with room for a "
                "reference, or drop it."
            )

    def numbers(self) -> Numbers:
        return {"reference_declines": {"off": self.count}}
