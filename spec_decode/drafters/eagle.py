"""Trees from EAGLE-1, EAGLE-2 and EAGLE-3 heads (Li et al., arXiv 2401.15077, 2503.01840)."""

from __future__ import annotations

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees


class EagleTrees(TargetDependentTrees, EagleSpeculator):
    """What vLLM builds in the place of `EagleSpeculator`; it adds how the draft is loaded."""
