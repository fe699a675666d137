"""Count, in a worker, the steps that replayed a FULL CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import LLM


@dataclass(frozen=True)
class Steps:
    """Forward passes of a worker, and how many of them were replays of a FULL graph."""

    forwards: int = 0
    full: int = 0

    def __sub__(self, other: Steps) -> Steps:
        return Steps(self.forwards - other.forwards, self.full - other.full)


def _install(worker: Any) -> str:
    """Start counting; return the CUDA graph mode of the runner."""
    runner = worker.model_runner
    counts = runner.graft_bench_steps = {"forwards": 0, "full": 0}
    execute, manager = runner.execute_model, runner.cudagraph_manager

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        counts["forwards"] += scheduler_output.total_num_scheduled_tokens > 0
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    if manager is None:
        return "none"
    replay = manager.run_fullgraph

    def run_fullgraph(*args: Any, **kwargs: Any) -> Any:
        counts["full"] += 1
        return replay(*args, **kwargs)

    manager.run_fullgraph = run_fullgraph
    return str(getattr(manager, "cudagraph_mode", "unknown"))


def _read(worker: Any) -> tuple[int, int]:
    counts = worker.model_runner.graft_bench_steps
    return counts["forwards"], counts["full"]


def install(llm: LLM) -> str:
    """Start counting in the first worker of an engine; returns its CUDA graph mode."""
    return str(llm.collective_rpc(_install)[0])


def read(llm: LLM) -> Steps:
    """Return the counts since :func:`install`."""
    return Steps(*llm.collective_rpc(_read)[0])
