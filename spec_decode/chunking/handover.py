"""Hands what an engine's workers have said to the scheduler.

VLLM builds the scheduler after the workers, in the same process and from the same configuration
object: that object says whose it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

T = TypeVar("T")


class Handover(Generic[T]):
    """Keeps one value for each configuration until the scheduler takes it."""

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
    """Rows of the largest graph that this worker of vLLM's has captured for a mixed batch; 0 if
    none."""
    graphs = getattr(worker.model_runner, "cudagraph_manager", None)
    captured = () if graphs is None else graphs.graphs
    return max(
        (desc.num_tokens for desc in captured if desc.uniform_token_count is None), default=0
    )


def ask_workers(engine: EngineCore) -> None:
    """Ask an engine's workers, which have captured their graphs; keep what all of them have."""
    ranks: list[int] = engine.collective_rpc(captured_rows)
    ROWS.keep(engine.vllm_config, min(ranks))
