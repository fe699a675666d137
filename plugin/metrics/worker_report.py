"""The worker's side: about once per second a step's result also carries the parts' numbers. vLLM's
model runner returns a ``ModelRunnerOutput`` per step, which goes to the scheduler whatever executor
there is. vLLM takes the result of one rank, so nothing is counted twice. A worker in the engine
core's own process is asked directly instead."""

import copy
import time
from collections.abc import Callable
from typing import Any

from vllm_graft.base import info
from vllm_graft.base.log import warning_once
from vllm_graft.base.values import reason_of
from vllm_graft.seams.wrap import around

ATTRIBUTE = "vllm_graft_report"
"""Where a ``ModelRunnerOutput`` carries the report."""

SECONDS = 1.0
"""Least time between two reports, unless the engine becomes idle."""


class WorkerReport:
    """Decides when a step carries a report, and puts it there."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported = float("-inf")
        self.errors = 0

    def attach(self, runner: Any) -> None:
        """Look at what either of vLLM's model runners returns; again does nothing more."""

        @around(runner, "execute_model")
        def then_report(original: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(scheduler_output, *args, **kwargs)
            # A step without tokens comes when the last request has ended: what is counted by then
            # would otherwise wait for the next request.
            last = not getattr(scheduler_output, "total_num_scheduled_tokens", 1)
            if _is_result(output) and not kwargs.get("dummy_run") and (last or self._due()):
                return self.carried_by(output)
            return output

        for name in {"sample_tokens", "pool"} & {*dir(runner)}:

            @around(runner, name)
            def then_carry(original: Any, *args: Any, **kwargs: Any) -> Any:
                output = original(*args, **kwargs)
                return self.carried_by(output) if _is_result(output) and self._due() else output

    def carried_by(self, output: Any) -> Any:
        """The output of a step, with a report; it never raises. It is a ``ModelRunnerOutput``, or
        an ``AsyncModelRunnerOutput`` that becomes one."""
        try:
            return self._carried_by(output)
        except Exception as error:
            self.errors += 1
            warning_once(f"a worker's metrics are incomplete: {reason_of(error)}")
            return output

    def _carried_by(self, output: Any) -> Any:
        report = report_now(self.errors)
        self._reported = self._clock()
        if not hasattr(output, "get_output"):
            # A copy, as vLLM's empty output is one object for all steps.
            output = copy.copy(output)
            setattr(output, ATTRIBUTE, report)
            return output
        # Model Runner V2 and V1 name it differently. Nothing may refer back to the asynchronous
        # output, which would keep its device tensors alive until a garbage collection.
        inner = getattr(output, "model_runner_output", None) or output._model_runner_output
        setattr(inner, ATTRIBUTE, report)
        return output

    def _due(self) -> bool:
        return self._clock() - self._reported >= SECONDS


def report_now(errors: int = 0) -> dict[str, Any]:
    """What the parts of this process run and have counted, and failures of earlier reports."""
    return {**info.states(), "errors": errors, "numbers": info.numbers()}


def report_of(output: Any) -> dict[str, Any] | None:
    """The report that a ``ModelRunnerOutput`` carries, if it does."""
    found: dict[str, Any] | None = getattr(output, ATTRIBUTE, None)
    return found


def _is_result(output: Any) -> bool:
    """Whether it goes to the scheduler: hidden states for the next stage of a pipeline do not."""
    return hasattr(output, "get_output") or hasattr(output, "req_ids")
