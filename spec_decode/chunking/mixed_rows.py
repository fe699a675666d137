"""How many rows the largest whole CUDA graph of a mixed batch has, which the workers know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_graft.spec_decode.chunking.handover import Handover

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

ROWS: Handover[int] = Handover()
"""Rows of that graph, from when the workers have captured it until the scheduler is built."""


def captured_rows(worker: Any) -> int:
    """Rows of the largest graph that a worker of vLLM's has captured for a mixed batch; 0 if none.

    It runs in each worker.
    """
    graphs = getattr(worker.model_runner, "cudagraph_manager", None)
    captured = () if graphs is None else graphs.graphs
    return max(
        (desc.num_tokens for desc in captured if desc.uniform_token_count is None), default=0
    )


def ask_workers(engine: EngineCore) -> None:
    """Ask an engine's workers, which have captured their graphs; keep what all of them have."""
    ranks: list[int] = engine.collective_rpc(captured_rows)
    ROWS.keep(engine.vllm_config, min(ranks))
