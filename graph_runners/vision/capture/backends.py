"""Which back end captures on a device."""

from __future__ import annotations

import torch

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.capture.cuda_backend import CudaBackend
from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend


def make_backend(device: torch.device) -> GraphBackend:
    """The back end that captures on `device`.

    Raises:
        GraftError: if the device has no CUDA graphs.
    """
    if device.type == "cuda":
        return CudaBackend(device)
    raise GraftError(f"there are no CUDA graphs on the device {device}")
