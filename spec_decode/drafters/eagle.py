"""Trees from EAGLE heads (Li et al., arXiv 2401.15077 and 2503.01840)."""

from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees


class EagleTrees(TargetDependentTrees, EagleSpeculator):
    """What vLLM builds in the place of `EagleSpeculator`; it adds how the draft is loaded."""
