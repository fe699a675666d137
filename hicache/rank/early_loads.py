"""Loads within a step begin before vLLM prepares the step's inputs.

vLLM tells a connector of a step right before its forward pass. Until then the host is busy for one
to two milliseconds with what the step reads, and the link to host memory would rest; a prompt whose
prefix comes over that link waits for it. What such a load has to come after, that reused blocks are
zeroed and shared ones copied, is submitted before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_graft.hicache.messages.step_metadata import HiCacheMetadata
from vllm_graft.seams.wrap import wrap

_RUNNER = "vllm.v1.worker.gpu.model_runner"


def hook() -> None:
    """Have the model runner of this process begin our loads early; once is enough."""
    # Whoever builds a rank's connector is a model runner. Another kind than V2's has no such place,
    # and its loads begin with the forward pass.
    if (module := sys.modules.get(_RUNNER)) is not None:
        wrap(module.GPUModelRunner, "gather_batch_req_state", _then_gather)


def _then_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        if not dummy_run:
            begin(scheduler_output)
        return original(self, scheduler_output, dummy_run)

    return gather_batch_req_state


def begin(scheduler_output: Any) -> None:
    """Submit the step's loads, if the metadata is ours and not wrapped in another connector's."""
    metadata = scheduler_output.kv_connector_metadata
    if isinstance(metadata, HiCacheMetadata) and metadata.sync_loads:
        connector: Any = get_kv_transfer_group()
        connector.begin_loads(metadata)
