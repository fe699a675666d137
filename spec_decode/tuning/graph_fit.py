"""Cuts trees that run beside prompts to their best nodes, so that the step fits a CUDA graph. A
step beyond the largest captured graph is launched piece by piece, which keeps the host busy for
longer than the device and costs more than the last nodes yield."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graft.seams.wrap import around
from vllm_graft.spec_decode.chunking.prompt_chunks import is_chunked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

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


def fit_to_graphs(scheduler: Scheduler, max_rows: int) -> None:
    """Let `scheduler` cut trees beside prompts, before KV connector and requests know the step."""

    # Only this scheduler is changed: others in the process may have other configurations.
    @around(scheduler, "_build_kv_connector_meta")
    @around(scheduler, "_update_after_schedule")
    def then_cut(original: Any, *args: Any) -> Any:
        cut_trees(args[-1], max_rows)
        return original(*args)
