"""A hook that begins loads within a step before vLLM prepares the step's inputs.

vLLM calls a connector right before the step's forward pass. Before that, the host prepares inputs
for one to two milliseconds, in which the link to host memory would be idle, although a prompt waits
for its prefix to come over that link. The earlier begin is safe. A load has to come after vLLM has
zeroed reused blocks and copied shared ones, and vLLM submits that work even earlier.
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
    """Let the model runner of this process begin our loads early. Later calls do nothing."""
    # A model runner builds a rank's connector, so its module is loaded. Model runners other than V2
    # have no such place to hook, so their loads begin with the forward pass.
    if (module := sys.modules.get(_RUNNER)) is not None:
        wrap(module.GPUModelRunner, "gather_batch_req_state", _then_gather)


def _then_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def gather_batch_req_state(self: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        if not dummy_run:
            begin(scheduler_output)
        return original(self, scheduler_output, dummy_run)

    return gather_batch_req_state


def begin(scheduler_output: Any) -> None:
    """Submit the step's loads, unless the metadata belongs to another connector."""
    metadata = scheduler_output.kv_connector_metadata
    if isinstance(metadata, HiCacheMetadata) and metadata.sync_loads:
        connector: Any = get_kv_transfer_group()
        connector.begin_loads(metadata)
