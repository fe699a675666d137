"""The tables that vLLM's managers of CUDA graphs keep private: graphs to capture, and to replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    Serving = dict[tuple[int, int], list[BatchExecutionDescriptor]]
    """Graphs that may serve a batch, the preferred first, by its tokens and active LoRAs."""


def planned(manager: CudaGraphManager) -> list[BatchExecutionDescriptor]:
    """FULL graphs that a manager is to capture."""
    from vllm.config import CUDAGraphMode

    return list(manager._capture_descs.get(CUDAGraphMode.FULL, []))


def plan(manager: CudaGraphManager, sizes: Sequence[BatchExecutionDescriptor]) -> None:
    """Let a manager capture these FULL graphs and no others."""
    from vllm.config import CUDAGraphMode

    # Later ones fit into the memory that these took from the pool.
    largest_first = sorted(sizes, key=lambda size: size.num_tokens, reverse=True)
    if largest_first:
        manager._capture_descs[CUDAGraphMode.FULL] = largest_first
    else:
        # vLLM takes a mode that is listed for one that has graphs.
        manager._capture_descs.pop(CUDAGraphMode.FULL, None)


def serving(manager: CudaGraphManager) -> Serving:
    """The manager's own table of the graphs that may serve a batch; changes to it count."""
    table: Serving = manager._candidates
    return table
