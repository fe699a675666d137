"""What single drafters rely on beside what all trees do: MTP modules, n-grams."""

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
        ("config.speculative.SpeculativeConfig.use_gemma4_mtp", "source", "ad44db6d7ac8", "says when vLLM builds the class for Gemma 4, which has a drafter of its own"),
    ),
    *seams("mtp", "vLLM's heads offer their best k tokens", "model_executor.models",
        ("mimo_mtp.MiMoMultiTokenPredictor", "has", "embed_tokens, logits_processor", "stands before the processor while it looks"),
        ("mimo_mtp.MiMoMultiTokenPredictor.compute_logits", "order", "self.logits_processor(lm_head, hidden_states)", _HEAD),
        ("ernie_mtp.ErnieMultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("ernie_mtp.ErnieMultiTokenPredictor.compute_logits", "order", "self.logits_processor(lm_head, hidden_states)", _HEAD),
        ("glm4_moe_mtp.Glm4MoeMultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("glm4_moe_mtp.Glm4MoeMultiTokenPredictor.compute_logits", "order", "self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
        ("deepseek_mtp.DeepSeekMultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("deepseek_mtp.DeepSeekMultiTokenPredictor.compute_logits", "order", "self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
        ("hy_v3_mtp.HYV3MultiTokenPredictor", "has", "embed_tokens, logits_processor", "likewise"),
        ("hy_v3_mtp.HYV3MultiTokenPredictor.compute_logits", "order", "self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
    ),
)

GEMMA4: tuple[Seam, ...] = (
    *seams("gemma4", "a speculator registry (vLLM RFC #36219)", "",
        ("v1.worker.gpu.spec_decode.gemma4.speculator.Gemma4Speculator", "class", "TargetDependentARSpeculator", "its __new__ builds our subclass"),
        ("v1.worker.gpu.spec_decode.gemma4.speculator.Gemma4Speculator._setup_gemma4_kv_sharing", "order", "attn.kv_sharing_target_layer_name = target_layer_name", "its layers have no K/V of their own: no scratch"),
        ("model_executor.models.gemma4_mtp.Gemma4MTPAttention.forward", "order", "self.attn(q, None, None)", "a level writes no K/V"),
        ("model_executor.models.gemma4_mtp.Gemma4MTP", "has", "lm_head, logits_processor, masked_embedding", "an FP8 head or hot tokens need logits of all rows of the head"),
    ),
)

NGRAM: tuple[Seam, ...] = (
    *seams("ngram", "a speculator registry (vLLM RFC #36219)", "v1.worker.gpu.spec_decode",
        ("ngram.speculator.NgramGPUSpeculator", "class", "BaseSpeculator", "its __new__ builds our subclass"),
        ("ngram.speculator.NgramGPUSpeculator.init_cudagraph_manager", "source", "88bb07973d13", "does nothing: called before we plan our graphs"),
        ("speculator.BaseSpeculator.propose", "call", "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state=, dummy_run=, skip_attn_for_dummy_run=, mm_inputs=, is_profile=, num_speculative_tokens=", "the last tokens are its eighth argument"),
        ("speculator.DraftModelSpeculator.load_model", "source", "2294b4d0ce70", "asks load_draft_model for a model, which may have no layers"),
        ("speculator.DraftModelSpeculator.set_attn", "source", "84292d5e650a", "makes no attention groups for a draft without layers"),
    ),
    *seams("ngram", "a speculator registry (vLLM RFC #36219)", "config.speculative",
        ("SpeculativeConfig.use_ngram", "source", "8a052512e945", "says when vLLM builds that class"),
    ),
)
