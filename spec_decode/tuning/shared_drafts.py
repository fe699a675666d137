"""Keeps of each request's drafts as many as its share of a step is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_graft.seams.wrap import wrap

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_graft.spec_decode.tuning.shares import Share
    from vllm_graft.spec_decode.tuning.tuner import NodeTuner

_SHARED = "vllm_graft_shared"
"""The attribute of a ``SchedulerOutput`` with the numbers of the shares whose drafts it verifies
and drafts; 0 for none."""

_REMEMBERED = 16
"""Latest shares that are remembered: asynchronous scheduling is a step or two ahead."""


def verifies_share(output: SchedulerOutput) -> bool:
    """Whether the requests of a step verify numbers of nodes of their own."""
    return bool(getattr(output, _SHARED, (0, 0))[0])


class SharedDrafts:
    """Cuts the drafts of a scheduler's requests, and remembers which step had which share.

    Args:
        max_rows: most rows, root and nodes of all requests, that a step may verify.
    """

    def __init__(self, scheduler: Scheduler, tuner: NodeTuner, max_rows: int) -> None:
        self._requests, self._tuner, self._max_rows = scheduler.requests, tuner, max_rows
        self._shares: dict[int, Share] = {}
        self._latest = self._drafted = 0

        def then_cut(original: Callable[..., Any]) -> Callable[..., Any]:
            def _update_after_schedule(output: SchedulerOutput) -> Any:
                result = original(output)
                drafting = self._number(tuner.share) if output.num_spec_tokens_to_schedule else 0
                if self._drafted or drafting:
                    setattr(output, _SHARED, (self._drafted, drafting))
                self._drafted = drafting
                self._cut(output.num_scheduled_tokens)
                return result

            return _update_after_schedule

        def then_cut_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
            def update_draft_token_ids(drafts: Any) -> Any:
                result = original(drafts)
                self._cut(drafts.req_ids)
                return result

            return update_draft_token_ids

        # Only this scheduler is changed: others in the process may have other configurations.
        # Asynchronous scheduling sets placeholders with the step; else the drafts themselves come.
        wrap(scheduler, "_update_after_schedule", then_cut)
        wrap(scheduler, "update_draft_token_ids", then_cut_tokens)

    def of(self, output: SchedulerOutput) -> tuple[Share | None, Share | None]:
        """The shares whose drafts a step verifies, and drafts."""
        verified, drafted = getattr(output, _SHARED, (0, 0))
        return self._shares.get(verified), self._shares.get(drafted)

    def _number(self, share: Share | None) -> int:
        if share is None:
            return 0
        if self._shares.get(self._latest) is not share:
            self._latest += 1
            self._shares[self._latest] = share
            self._shares.pop(self._latest - _REMEMBERED, None)
        return self._latest

    def _cut(self, names: Iterable[str]) -> None:
        share = self._shares.get(self._drafted)
        if share is None:
            return
        here = [self._requests[name] for name in names if name in self._requests]
        requests = [request for request in here if request.spec_token_ids]
        widths = share.of([request.request_id for request in requests], self._max_rows)
        for request, width in zip(requests, widths):
            if len(request.spec_token_ids) > width:
                request.spec_token_ids = request.spec_token_ids[:width]
