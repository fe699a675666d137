"""What trees of MTP modules rely on beside what all trees do."""

from __future__ import annotations

from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.notation import seams

_HEAD = (
    "finds rows and norm by what is passed to the logits processor, and computes other logits there"
)

# Columns: path, kind, what is expected, why.
# fmt: off
MTP: tuple[Seam, ...] = (
    *seams("mtp", "a speculator registry (vLLM RFC #36219)", "",
        ("v1.worker.gpu.spec_decode.mtp.speculator.MTPSpeculator", "class", "TargetDependentARSpeculator", "its __new__ builds our subclass"),
        ("config.speculative.SpeculativeConfig.use_multi_module_mtp", "source", "3497d9d11dd6", "says when vLLM builds another class: refused before"),
        ("config.speculative.SpeculativeConfig.use_gemma4_mtp", "source", "ad44db6d7ac8", "likewise"),
    ),
    *seams("mtp", "vLLM's heads offer their best k tokens", "model_executor.models",
        ("mimo_mtp.MiMoMultiTokenPredictor", "has", "embed_tokens, logits_processor", "stands before the processor while it looks"),
        ("mimo_mtp.MiMoMultiTokenPredictor.compute_logits", "order", "self.logits_processor(lm_head, hidden_states)", _HEAD),
        ("ernie_mtp.ErnieMultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("ernie_mtp.ErnieMultiTokenPredictor.compute_logits", "order", "self.logits_processor(lm_head, hidden_states)", _HEAD),
        ("glm4_moe_mtp.Glm4MoeMultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("glm4_moe_mtp.Glm4MoeMultiTokenPredictor.compute_logits", "order", "self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
        ("hy_v3_mtp.HYV3MultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("hy_v3_mtp.HYV3MultiTokenPredictor.compute_logits", "order", "self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
    ),
)
