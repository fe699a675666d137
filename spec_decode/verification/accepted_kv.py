"""What a KV connector gets to see beside trees: K/V of accepted tokens, whichever connector it is.

The scheduler's side of a connector decides which tokens to save, and the worker's side copies them.
Both would see rows of drafts: vLLM counts them as computed when it schedules a step, and again when
a stop ends a request between drafts; and layers are saved within the pass, before the accepted path
is in its place. So the scheduler's side is told of known tokens alone, and the worker's side gets
the target's layers once the path has moved. Known tokens have their final K/V then. The draft's
layers follow with their own pass over the accepted tokens: their K/V travels as the target's does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def count_accepted(scheduler: Scheduler) -> None:
    """Let `scheduler` tell its KV connector, if it has one, of accepted tokens alone."""
    if scheduler.connector is None:
        return
    tokens = AcceptedTokens(scheduler.requests)

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(scheduler, "_build_kv_connector_meta")
    def then_count(original: Any, connector: Any, output: SchedulerOutput) -> Any:
        view, starts = tokens.of_step(output)
        with counted(scheduler.requests, starts):
            return original(connector, view)

    @around(scheduler, "_connector_finished")
    def then_end(original: Any, request: Request) -> Any:
        # The last token was sampled, so that it has no K/V. A stop may lie before accepted drafts,
        # and a step in flight counts all of its drafts.
        known = request.num_tokens - bool(request.num_output_tokens)
        name = request.request_id
        with counted({name: request}, {name: min(request.num_computed_tokens, known)}):
            return original(request)


class AcceptedTokens:
    """Describes each step as if its requests computed tokens that are known, and no drafts. A
    request's tokens of all steps follow each other. So a connector may add them up, or add those of
    the step to those before it: either way it ends at a token that is known, and its K/V is final
    when the step has ended. With async scheduling that is a step later than it might be."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests
        self._ends: dict[str, int] = {}

    def of_step(self, output: SchedulerOutput) -> tuple[SchedulerOutput, dict[str, int]]:
        """What a connector is told of a step that was not counted as computed yet. Returns a copy
        of `output` that differs in the scheduled and the computed tokens of each request, without
        drafts; and the latter by request. The number of all rows stays, as it measures the step."""
        cached = output.scheduled_cached_reqs
        begun = (each.req_id for each in output.scheduled_new_reqs)
        for name in (*output.finished_req_ids, *begun, *cached.resumed_req_ids):
            self._ends.pop(name, None)
        starts: dict[str, int] = {}
        scheduled: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        for name, rows in output.num_scheduled_tokens.items():
            request = self._requests[name]
            computed = request.num_computed_tokens
            starts[name] = start = min(computed, self._ends.get(name, computed))
            self._ends[name] = end = max(start, min(computed + rows, request.num_tokens))
            scheduled[name] = end - start
        view = copy.copy(output)
        view.num_scheduled_tokens, view.scheduled_spec_decode_tokens = scheduled, drafts
        view.scheduled_cached_reqs = copy.copy(cached)
        view.scheduled_cached_reqs.num_computed_tokens = [starts[name] for name in cached.req_ids]
        return view, starts


@contextlib.contextmanager
def counted(requests: Mapping[str, Request], computed: Mapping[str, int]) -> Iterator[None]:
    """Let requests have so many computed tokens for the time being."""
    before = {name: requests[name].num_computed_tokens for name in computed}
    try:
        for name, tokens in computed.items():
            requests[name].num_computed_tokens = tokens
        yield
    finally:
        for name, tokens in before.items():
            requests[name].num_computed_tokens = tokens


def hold_saves(worker: Any) -> None:
    """Let a worker, which has loaded its model, save layers with the accepted path in its place."""
    runner = worker.model_runner
    saves: LayerSaves = runner.speculator.context.saves

    @around(runner, "initialize_kv_cache")
    def then_hold(original: Any, *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        connector = getattr(runner.kv_connector, "kv_connector", None)
        if connector is not None:
            around(runner.kv_connector, "pre_forward")(saves.begin)
            around(connector, "save_kv_layer")(saves.save)
            saves.draft_layers = len(getattr(runner.speculator, "draft_attn_layer_names", ()))


class LayerSaves:
    """The layers that a step's passes offer to a connector, each of them once.

    A step without drafts has nothing to wait for. The draft's layers run once for each level of a
    tree, whose K/V is elsewhere: only their first pass writes K/V of accepted tokens.
    `draft_layers`: number of the draft's layers whose K/V travels; 0 without a connector."""

    def __init__(self) -> None:
        self.draft_layers = 0
        self._seen: set[str] = set()
        self._held: list[Callable[[], None]] | None = None

    def begin(
        self, original: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        """Before a pass: hold the target's layers of a step that verifies drafts."""
        self._seen = set()
        self._held = [] if scheduler_output.scheduled_spec_decode_tokens else None
        return original(scheduler_output, *args, **kwargs)

    def save(self, original: Any, layer_name: str, *args: Any, **kwargs: Any) -> None:
        """Take the place of ``save_kv_layer``, which each layer calls within the pass."""
        if layer_name in self._seen:
            return
        self._seen.add(layer_name)
        save = functools.partial(original, layer_name, *args, **kwargs)
        if self._held is None:
            save()
        else:
            self._held.append(_in_this_context(save))

    def release(self) -> None:
        """Save what is held, in the order in which the layers ran."""
        held, self._held = self._held, None
        for save in held or ():
            save()


def _in_this_context(save: Callable[[], None]) -> Callable[[], None]:
    """What saves later on, in the forward context of now."""
    from vllm.forward_context import get_forward_context, override_forward_context

    context = get_forward_context()

    def later() -> None:
        with override_forward_context(context):
            save()

    return later
