"""Predictions that nothing reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_graft.base.log import warning_once
from vllm_graft.base.options import flag
from vllm_graft.spec_decode.trees.reference import KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.base.metric import Numbers


class UnreadPredictions:
    """A `TextWatch` of an engine without n-grams, or without room for references: it counts."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, req_states: RequestState) -> None:
        """Do nothing: texts are not read."""

    def begin(self, req_index: int, request: NewRequestData) -> None:
        """Count a request that has a prediction."""
        params = request.sampling_params
        if params is not None and KEY in (params.extra_args or {}):
            self.count += 1
            warning_once(
                f"a request's {KEY} is not used: set {flag('tree', 'ngram')}, with room for a "
                "reference, or drop it."
            )

    def numbers(self) -> Numbers:
        """The numbers of the metrics."""
        return {"reference_declines": {"off": self.count}}
