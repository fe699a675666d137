"""Lets steps with prompts fit a CUDA graph: prompts in chunks, trees beside them cut.

A step beyond the largest captured graph is launched piece by piece. With few rows that keeps the
host busy for longer than the device, and all requests beside the prompt wait for it. Trees are cut
to their best nodes where that is enough: the last nodes yield less than a launch costs. Where up to
`MOST_CHUNKS` replays do the work of a launch, prompts are computed in chunks: that takes no longer,
and the other requests get a token from each replay. With more rows the device is the slower one, so
that such steps stay as vLLM makes them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from vllm_graft.base.options import target_of
from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

MOST_CHUNKS = 3
"""Replays of the largest graph that are preferred to one launch. On an H100 with an 8B-shaped
target, a replay of 512 rows takes 14 ms, and a launch of 513 to 1,500 rows takes 45 to 60."""

LEAST_ROWS = 128
"""Rows of the largest graph from which prompts are chunked. A chunk's least rows, half of them, are
also room for a prompt of one token, beside which vLLM reserves rows of a full tree."""

LEAST_NODES = 7
"""Nodes that each tree keeps while prompts wait, where trees can be cut. They yield most of a
tree's tokens, and each further one delays a row of a prompt."""

QUIET_STEPS = 4
"""Steps without drafts that prompts may take one after the other, once as many steps had drafts. A
burst of up to five chunks takes no more; and prompts of some never stop the drafts of all."""

_CHUNKED = "vllm_graft_chunked"
"""The attribute of a ``SchedulerOutput`` whose prompts were chunked."""

_DRAFTED = "vllm_graft_drafted"
"""The attribute of a ``SchedulerOutput`` with the nodes that its trees had before they were cut."""


def graph_rows(vllm_config: VllmConfig, mixed_graphs: bool | None) -> int:
    """Rows of the largest CUDA graph for a step with prompts; 0 if no such step has a graph.
    `mixed_graphs` is the configured value, which may ask for graphs that vLLM doesn't capture."""
    compilation = vllm_config.compilation_config
    if not mixed_graphs and not compilation.cudagraph_mode.mixed_mode():
        return 0
    return compilation.max_cudagraph_capture_size or 0


def nodes_that_fit(
    scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], max_rows: int
) -> int | None:
    """Most nodes that each tree may have if the step is to fit a graph of so many rows. Returns
    None if nothing is to be cut: no prompts run beside the trees, the step fits as it is, or it
    would not fit without any node either. `scheduled`: rows of each request. `drafts`: nodes of the
    requests that have a tree; each also has a row for its root."""
    total = sum(scheduled.values())
    if total <= max_rows:
        return None
    nodes = sum(map(len, drafts.values()))
    trees = sum(1 for each in drafts.values() if each)
    decodes = sum(1 for name, rows in scheduled.items() if rows == 1 + len(drafts.get(name, ())))
    has_prompts = decodes < len(scheduled)
    if not trees or not has_prompts or total - nodes > max_rows:
        return None
    return (max_rows - (total - nodes)) // trees


def cut_trees(output: SchedulerOutput, max_rows: int) -> None:
    """Cut a step's trees to fit, before the scheduler counts the step as computed."""
    scheduled, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
    kept = nodes_that_fit(scheduled, drafts, max_rows)
    if kept is None:
        return
    setattr(output, _DRAFTED, max(map(len, drafts.values())))
    for name, tokens in list(drafts.items()):
        if (cut := len(tokens) - kept) > 0:
            scheduled[name] -= cut
            output.total_num_scheduled_tokens -= cut
            drafts[name] = tokens[:kept]
            if not kept:
                del drafts[name]


def drafted(output: SchedulerOutput) -> int | None:
    """Nodes of a step's trees before they were cut; None if they were not cut."""
    found: int | None = getattr(output, _DRAFTED, None)
    return found


def fit_to_graphs(scheduler: Scheduler, max_rows: int) -> None:
    """Let `scheduler` cut trees beside prompts, before KV connector and requests know the step."""

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(scheduler, "_build_kv_connector_meta")
    @around(scheduler, "_update_after_schedule")
    def then_cut(original: Any, *args: Any) -> Any:
        cut_trees(args[-1], max_rows)
        return original(*args)


class Rows(NamedTuple):
    """Rows that a step would have without any limit: of decodes (roots and nodes), of these roots,
    one per request, and of the rest of prompts."""

    decodes: int
    roots: int
    prompts: int


def chunk_rows(rows: Rows, max_rows: int, *, cuts: bool) -> int | None:
    """Most rows that the prompts of a step may have if the step is to fit a graph of `max_rows`.
    Returns what the decodes leave, with no more than `LEAST_NODES` per tree if trees are cut, and
    at least half of the graph. None if the prompts are to run as vLLM would run them: the step
    fits, or fits once its trees are cut, or the prompts have too many rows."""
    decodes = min(rows.decodes, rows.roots * (1 + LEAST_NODES)) if cuts else rows.decodes
    if rows.decodes + rows.prompts <= max_rows or decodes + rows.prompts > MOST_CHUNKS * max_rows:
        return None
    chunk = max(max_rows - decodes, max_rows // 2)
    return chunk if chunk < rows.prompts else None


def rows_to_come(scheduler: Scheduler, most: int) -> Rows:
    """Rows that the next step would have without any limit; of prompts, exact up to `most`. What
    the caches hold of a waiting prompt is not known yet and counts, too."""
    decodes = roots = prompts = 0
    for request in scheduler.running:
        rows = request.num_tokens_with_spec + request.num_output_placeholders
        rows -= request.num_computed_tokens
        if request.is_prefill_chunk:
            prompts += rows
        else:
            decodes += rows
            roots += 1
    room = scheduler.max_num_running_reqs - len(scheduler.running)
    for request in itertools.islice(scheduler.waiting, max(0, min(room, most))):
        if prompts > most:
            break
        prompts += request.num_tokens - request.num_computed_tokens
    return Rows(decodes, roots, prompts)


def step_limit(scheduler: Scheduler, max_rows: int, *, cuts: bool) -> int | None:
    """Most rows of the scheduler's next step before trees are cut; None for vLLM's own limit."""
    if not scheduler.waiting and not any(each.is_prefill_chunk for each in scheduler.running):
        return None  # There are no prompts.
    rows = rows_to_come(scheduler, MOST_CHUNKS * max_rows)
    chunk = chunk_rows(rows, max_rows, cuts=cuts)
    return None if chunk is None else rows.decodes + chunk


def leaves_prompts(scheduler: Scheduler, output: SchedulerOutput) -> bool:
    """Whether a step, not counted by the scheduler yet, computes only a part of a prompt."""
    requests = (
        (scheduler.requests[name], rows) for name, rows in output.num_scheduled_tokens.items()
    )
    return any(
        request.num_computed_tokens + rows < request.num_tokens + request.num_output_placeholders
        for request, rows in requests
    )


def chunk_prompts(scheduler: Scheduler, max_rows: int, *, cuts: bool) -> None:
    """Let `scheduler` compute prompts in chunks where its step fits a graph of `max_rows` by that.

    While a chunk leaves some of its prompt, no drafts are asked for if vLLM's table (``auto`` or
    ``num_speculative_tokens_per_batch_size``) says how many are: to draft them, and to verify them
    beside the next chunk, would delay the prompt. Each such step uses up one of `QUIET_STEPS`, and
    each other one brings one back."""
    limited, quiet_left = False, QUIET_STEPS

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(scheduler, "schedule")
    def then_limit(original: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal limited
        limit = step_limit(scheduler, max_rows, cuts=cuts)
        most = scheduler.max_num_scheduled_tokens
        if limit is None or limit >= most:
            return original(*args, **kwargs)
        scheduler.max_num_scheduled_tokens, limited = limit, True
        try:
            return original(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens, limited = most, False

    @around(scheduler, "_update_after_schedule")
    def then_mark(original: Any, output: SchedulerOutput) -> Any:
        nonlocal quiet_left
        # A prompt that waits for something else, such as its grammar, was counted in vain.
        chunked = limited and leaves_prompts(scheduler, output)
        if chunked:
            setattr(output, _CHUNKED, True)
        if chunked and scheduler.dynamic_sd_lookup is not None and quiet_left > 0:
            output.num_spec_tokens_to_schedule = 0
            quiet_left -= 1
        else:
            quiet_left = min(quiet_left + 1, QUIET_STEPS)
        return original(output)


def can_chunk(scheduler: Scheduler, max_rows: int) -> bool:
    """Whether a scheduler's prompts can be computed in chunks beside graphs of so many rows. Not
    where vLLM computes an image or a block of recurrent states at once: one of more rows than a
    chunk would never be computed."""
    config = scheduler.vllm_config.scheduler_config
    whole = config.disable_chunked_mm_input or scheduler.need_mamba_block_aligned_split
    return max_rows >= LEAST_ROWS and bool(config.enable_chunked_prefill) and not whole


def is_chunked(output: SchedulerOutput) -> bool:
    """Whether a step's prompts were chunked so that it fits a graph."""
    return bool(getattr(output, _CHUNKED, False))


def count_fitted(worker: Any) -> None:
    """Let a worker, which has loaded its model, count steps with cut trees or chunked prompts."""
    counters = worker.model_runner.speculator.context.counters

    @around(worker.model_runner, "execute_model")
    def then_count(
        original: Any, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        counters.cut_steps += drafted(scheduler_output) is not None
        counters.chunked_steps += is_chunked(scheduler_output)
        return original(scheduler_output, *args, **kwargs)


T = TypeVar("T")


class Handover(Generic[T]):
    """Keeps what the workers have said until the scheduler takes it. VLLM builds it after them, in
    the same process and from the same configuration object, which says whose the value is."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, T]] = []

    def keep(self, vllm_config: Any, value: T) -> None:
        self.take(vllm_config)
        self._kept.append((vllm_config, value))

    def take(self, vllm_config: Any) -> T | None:
        """The value that was kept for a configuration, once; None if there is none."""
        for place, (owner, value) in enumerate(self._kept):
            if owner is vllm_config:
                del self._kept[place]
                return value
        return None


ROWS: Handover[int] = Handover()
"""Rows of the largest whole CUDA graph of a mixed batch, which the workers have captured."""


def captured_rows(worker: Any) -> int:
    """Rows of the largest graph that this worker has captured for a mixed batch; 0 for none."""
    graphs = getattr(worker.model_runner, "cudagraph_manager", None)
    captured = () if graphs is None else graphs.graphs
    return max(
        (desc.num_tokens for desc in captured if desc.uniform_token_count is None), default=0
    )


def ask_workers(engine: EngineCore) -> None:
    """Ask an engine's workers, which have captured their graphs; keep what all of them have."""
    ranks: list[int] = engine.collective_rpc(captured_rows)
    ROWS.keep(engine.vllm_config, min(ranks))


def make_room(vllm_config: Any) -> None:
    """Let a step of MLA on a CPU hold the longest prompt, unless the user said how much it holds.

    vLLM turns chunks off there and raises ``max_num_batched_tokens`` to ``max_model_len``. Beside
    drafts it has by then derived ``max_num_scheduled_tokens`` from the smaller number, so that a
    longer prompt would wait forever. The larger one is harmless if chunks are on after all: the
    scheduler takes the least of both."""
    from vllm.platforms import current_platform

    scheduler, target = vllm_config.scheduler_config, target_of(vllm_config)
    given = scheduler.max_num_scheduled_tokens is not None
    if given or target is None or not target.use_mla or current_platform.device_type != "cpu":
        return
    scheduler.max_num_scheduled_tokens = max(scheduler.max_num_batched_tokens, target.max_model_len)
