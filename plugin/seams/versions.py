"""The engine module of the installed vLLM: one per minor version, which differ by behaviour.

Nothing else asks for vLLM's version. A minor that is newer than all that we know takes the newest
module: its seams have been compared with the ledger before anything here is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_graft.base.errors import SeamError
from vllm_graft.seams.compare import vllm_version
from vllm_graft.seams.ledger.entry import minor_of

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    Serving = dict[tuple[int, int], list[BatchExecutionDescriptor]]
    """Graphs that may serve a batch, the preferred first, by its tokens and active LoRAs."""


class V032:
    """What vLLM 0.32 keeps private and we need, behind names of ours."""

    minor = "0.32"

    def planned(self, manager: CudaGraphManager) -> list[BatchExecutionDescriptor]:
        """FULL graphs that a manager is to capture."""
        from vllm.config import CUDAGraphMode

        return list(manager._capture_descs.get(CUDAGraphMode.FULL, []))

    def plan(self, manager: CudaGraphManager, sizes: Sequence[BatchExecutionDescriptor]) -> None:
        """Let a manager capture these FULL graphs and no others."""
        from vllm.config import CUDAGraphMode

        # Later ones fit into the memory that these took from the pool.
        largest_first = sorted(sizes, key=lambda size: size.num_tokens, reverse=True)
        if largest_first:
            manager._capture_descs[CUDAGraphMode.FULL] = largest_first
        else:
            # vLLM takes a mode that is listed for one that has graphs.
            manager._capture_descs.pop(CUDAGraphMode.FULL, None)

    def serving(self, manager: CudaGraphManager) -> Serving:
        """The manager's own table of the graphs that may serve a batch; changes to it count."""
        table: Serving = manager._candidates
        return table


Engine = V032
"""What an engine module offers; newer ones are subclasses that override what has changed."""

ENGINES: tuple[type[Engine], ...] = (V032,)
"""Oldest first."""


@functools.cache
def engine() -> Engine:
    """The module for the installed vLLM; errors as `engine_for`."""
    return engine_for(vllm_version())


def engine_for(version: str) -> Engine:
    """The module for a version: the newest that is not newer than it.

    Raises:
        SeamError: if there is none, or the text is no version.
    """
    asked = minor_of(version)
    fitting = [known for known in ENGINES if minor_of(known.minor) <= asked]
    if not fitting:
        known = ", ".join(each.minor for each in ENGINES)
        raise SeamError(
            f"vLLM {version} is older than what vllm-graft knows ({known}): install one"
        )
    return fitting[-1]()
