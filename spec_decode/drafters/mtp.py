"""Trees from the module that a model brings to predict one token more (MTP, arXiv 2412.19437)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_graft.seams.compare import require_seams
from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class MtpTrees(TargetDependentTrees, MTPSpeculator):
    """What vLLM builds in the place of `MTPSpeculator`, which drafts with a single module.

    The module was trained to predict the token after the next one. Each level of a tree runs it
    again, over the states that its last run has left, as each step of vLLM's chain does.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        require_seams("mtp")
        super().__init__(vllm_config, device)
