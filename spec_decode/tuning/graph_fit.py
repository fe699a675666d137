"""Cuts trees that run beside prompts, so that the step still fits a CUDA graph.

A tree's nodes are ordered by score, so its first nodes are the best smaller tree. A step beyond the
largest captured graph is launched piece by piece, which keeps the host busy for longer than the
device and costs more than the last nodes yield.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_graft.seams.wrap import wrap
from vllm_graft.spec_decode.chunking.prompt_chunks import is_chunked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

_DRAFTED = "vllm_graft_drafted"
"""Where a ``SchedulerOutput`` keeps the number of nodes that its trees had before they were cut."""


def graph_rows(vllm_config: VllmConfig, mixed_graphs: bool | None) -> int:
    """Rows of the largest CUDA graph for a step with prompts; 0 if no such step has a graph.

    Args:
        vllm_config: the engine's.
        mixed_graphs: the configured value, which may ask for graphs that vLLM doesn't capture.
    """
    compilation = vllm_config.compilation_config
    if not mixed_graphs and not compilation.cudagraph_mode.mixed_mode():
        return 0
    return compilation.max_cudagraph_capture_size or 0


def nodes_that_fit(
    scheduled: Mapping[str, int], drafts: Mapping[str, Sequence[int]], max_rows: int
) -> int | None:
    """Most nodes that each tree may have if the step is to fit a graph.

    Args:
        scheduled: rows of each request.
        drafts: nodes of the requests that have a tree; each also has a row for its root.
        max_rows: rows of the largest graph.

    Returns:
        The number of nodes. None if nothing is to be cut: no prompts run beside the trees, the step
        fits as it is, or it would not fit without any node either.
    """
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
    """Leave out the last nodes of a step's trees where the step would fit no graph with them.

    Args:
        output: what the scheduler asks for, before the scheduler counts it as computed.
        max_rows: rows of the largest graph.
    """
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
    """Let a worker of vLLM's, which has loaded its model, count steps that were made to fit.

    Their trees were cut or their prompts chunked.
    """
    counters = worker.model_runner.speculator.context.counters

    def then_count(original: Callable[..., Any]) -> Callable[..., Any]:
        def execute_model(scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
            counters.cut_steps += drafted(scheduler_output) is not None
            counters.chunked_steps += is_chunked(scheduler_output)
            return original(scheduler_output, *args, **kwargs)

        return execute_model

    wrap(worker.model_runner, "execute_model", then_count)


def fit_to_graphs(scheduler: Scheduler, max_rows: int) -> None:
    """Let `scheduler` cut trees beside prompts to steps of at most `max_rows` rows.

    What a step computes is known to a KV connector and to the requests only after this.
    """

    def then_cut(original: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            cut_trees(args[-1], max_rows)
            return original(*args)

        return told

    # Only this scheduler is changed: others in the process may have other configurations.
    for name in ("_build_kv_connector_meta", "_update_after_schedule"):
        wrap(scheduler, name, then_cut)
