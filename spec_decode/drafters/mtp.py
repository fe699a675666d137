"""Trees from the module that a model brings to predict one token more (MTP, arXiv 2412.19437)."""

from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_graft.spec_decode.drafters.target_dependent import TargetDependentTrees


class MtpTrees(TargetDependentTrees, MTPSpeculator):
    """What vLLM builds in the place of `MTPSpeculator`, which drafts with a single module. The
    module was trained to predict the token after the next one. Each level of a tree runs it again,
    over the states that its last run has left, as each step of vLLM's chain does."""

    seams = ("mtp",)
