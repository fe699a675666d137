"""A scheduler whose chains are as long as the requests say, in an engine of any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

FLAG, SCHEDULER = "--scheduler-cls", f"{__name__}.told_scheduler"
"""The flag of vLLM that names the scheduler, and its value."""

DRAFTS = "vllm_graft_bench_drafts"
"""The key of ``SamplingParams.extra_args`` that has the drafts of each step."""


def told_scheduler(vllm_config: Any, **others: Any) -> Scheduler:
    """Build the scheduler that vLLM would have chosen. From a request that says so on, all steps
    have that many drafts. Requests reach it in any process. Raises `BenchmarkError` if the engine
    has no table of lengths, as with data parallelism."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler: Scheduler = stock(vllm_config=vllm_config, **others)
    table = scheduler.dynamic_sd_lookup
    if table is None:
        raise BenchmarkError(
            "vLLM keeps no speculative_config.num_speculative_tokens_per_batch_size here, so that "
            "an engine can't be told lengths in turn: give each length an arm of its own."
        )

    @around(scheduler, "add_request")
    def then_heed(original: Callable[[Request], None], request: Request) -> None:
        params = request.sampling_params
        asked = None if params is None else (params.extra_args or {}).get(DRAFTS)
        if asked is not None:
            table[:] = [asked] * len(table)
        original(request)

    return scheduler
