"""What single drafters rely on beside what all trees do: blocks, MTP modules, n-grams."""

from vllm_graft.seams.ledger.entry import seams

_BUFFERS = "input_buffers, hidden_states, sample_indices, sample_pos, sample_idx_mapping, sample_from_anchor, num_speculative_steps, num_query_per_req, query_cudagraph_manager"
_EDGES = "its pairs of candidates, scored, are what a tree is grown from"
_BIAS = "the bias by the token before, for each node of a level"
_PATH = "the bias by the tokens of a path, for each node of a level"
_HEAD = (
    "finds rows and norm by what is passed to the logits processor, and computes other logits there"
)

# Columns: path, kind, what is expected, why.
# fmt: off
BLOCK = (
    *seams("block", "a speculator registry (vLLM RFC #36219)", "v1.worker.gpu.spec_decode.dflash",
        ("speculator.DFlashSpeculator", "has", _BUFFERS, "its __new__ builds our subclass; where the block lies, and its predicting positions, of which we set how many"),
        ("speculator.DFlashSpeculator.__init__", "source", {"0.32": "93f52fd1908f", "0.33": "6c08fc56484e"}, "given a configuration whose number of tokens is the depth; our buffers replace what that is too small for"),
        ("speculator.DFlashSpeculator.init_cudagraph_manager", "source", "3fda2c89da28", "its graphs are those of a step with a tree"),
        ("speculator.DFlashSpeculator.capture", "source", "b351afb7dae1", "captures our _generate_draft, all requests padding"),
        ("speculator.DFlashSpeculator._prepare_graph_forward", "source", {"0.32": "459e400487e0", "0.33": "90d3705d30c5"}, "in a graph, before it: stores as many context rows as we say"),
        ("speculator.DFlashSpeculator._run_model", "call", "self, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=", "the one pass"),
        ("speculator.DFlashSpeculator._generate_draft", "source", {"0.32": "04d736f5fab3", "0.33": "a7ddb594512f"}, "overridden: grows a tree where it samples a chain"),
        ("speculator.DFlashSpeculator._num_graph_context_tokens", "source", "2882df0102c6", "overridden: a verified tree has more rows than a block"),
        ("speculator.DFlashSpeculator.propose", "source", {"0.32": "6f0b3780cc90", "0.33": "ecccd2841925"}, "called with the accepted path at the front, with combined states, and with the length and the graphs of this step's block"),
        ("speculator._prepare_dflash_inputs_kernel", "name", "present", "takes the first rows of a request for its context, and writes request-state indices k by k"),
        ("cudagraph.DFlashCudaGraphManager", "class", "CudaGraphManager", "the graphs that hold the tree; we make one for each number of nodes"),
        ("cudagraph.DFlashCudaGraphManager.capture", "source", "5a1a671e40dd", "calls both with the numbers of requests that we plan"),
        ("utils.load_dflash_model", "order", "draft_vllm_config = replace(, vllm_config=draft_vllm_config", "derives a configuration from ours, which is validated again"),
    ),
    *seams("block", "a speculator registry (vLLM RFC #36219)", "v1.worker.gpu.spec_decode",
        ("dflash2.speculator.DFlash2Speculator", "class", "DFlashSpeculator", "likewise"),
        ("dflash2.speculator.DFlash2Speculator._generate_draft", "source", "a9932a155add", _EDGES),
        ("dflash2.speculator.DFlash2Speculator._score_candidates", "call", "self, candidate_ids, unary_logits, hidden_states", _EDGES),
        ("lilicorr.speculator.LiLiCorrSpeculator", "class", "DFlash2Speculator", "likewise"),
        ("lilicorr.speculator.LiLiCorrSpeculator.prepare_context_anchor", "source", {"0.32": "891ac620d6f4", "0.33": "35531e081d52"}, "reads the last accepted row, which we have moved"),
        ("dspark.speculator.DSparkSpeculator", "has", "_draft_topk", "likewise; how many logits get a bias"),
        ("dspark.speculator.DSparkSpeculator._sample_sequential", "source", {"0.32": "d062dc3c0da1", "0.33": "911e9d7cf2c1"}, _BIAS),
        ("dspark.speculator.DSparkSpeculator._sample_sequential_topk", "source", "4fd131d0403e", _BIAS),
        ("dspark.speculator.DSparkSpeculator._generate_draft", "source", "57f182ab8b26", "overridden, likewise"),
    ),
    *seams("block", "a speculator registry (vLLM RFC #36219)", "",
        ("config.speculative.SpeculativeConfig.is_xpress", "call", {"0.33": "self"}, "says when vLLM builds XPressSpeculator, whose blocks are always whole"),
        ("v1.worker.gpu.spec_decode.xpress.speculator.XPressSpeculator", "class", {"0.33": "DFlashSpeculator"}, "likewise"),
        ("v1.worker.gpu.spec_decode.xpress.speculator.XPressSpeculator._generate_draft", "source", {"0.33": "d0898c6e76d1"}, "overridden, likewise"),
        ("v1.worker.gpu.spec_decode.xpress.speculator.XPressSpeculator._jacobi_refine", "source", {"0.33": "0dfbd3b99b82"}, _PATH),
        ("model_executor.models.qwen3_xpress.XPressRefinerHead", "has", {"0.33": "hidden_cache, in_proj, mix_L, mlp_down, mlp_gate, mlp_up, rank, topc, w1, w2"}, _PATH),
        ("model_executor.models.qwen3_xpress.XPressRefinerHead._refine_latent", "source", {"0.33": "2dfe36d594e0"}, _PATH),
        ("model_executor.models.qwen3_xpress.XPressRefinerHead.jacobi_refine_greedy", "source", {"0.33": "ea0d27b5fabd"}, "which tokens get a bias, and which token stands before the last one"),
        ("model_executor.models.qwen3_xpress.Qwen3XPressModel.__init__", "order", {"0.33": "xpress_block_size, num_speculative_steps, 15, xpress_rank, 256, xpress_mlp_hidden, 512, xpress_topc, 512"}, "the sizes of a refiner whose checkpoint doesn't say them"),
        ("model_executor.models.qwen3_xpress.Qwen3XPressForCausalLM", "has", {"0.33": "compute_draft_logits, lm_head, logits_processor"}, "the logits before the bias"),
    ),
    *seams("block", "vLLM's heads offer their best k tokens", "model_executor.models",
        ("qwen3_dflash.DFlashQwen3ForCausalLM", "has", "combine_hidden_states, compute_logits, draft_id_to_target_id, lm_head, logits_processor", "top k of all positions at once"),
        ("qwen3_dflash2.DFlash2Qwen3ForCausalLM.compute_candidates", "source", "94bdc8428910", "the candidates of each position, tokens of the target"),
        ("qwen3_dflash2.DFlash2Qwen3DecoderLayer.__init__", "order", "block_size=1 + speculative_config.num_speculative_tokens", "tells positions by the length of a block that it was loaded for: not shortened"),
        ("qwen3_dflash2._score_edges", "source", "e5d29097de9c", "the first axis of candidates is that of the position before"),
        ("qwen3_dspark.Qwen3DSparkForCausalLM", "has", "apply_markov_bias_gathered, compute_draft_logits, markov_bias, markov_embed", _BIAS),
        ("qwen3_dspark.DSparkMarkovHead.apply_bias_gathered", "source", "385a3071c780", _BIAS),
    ),
)

MTP = (
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

GEMMA4 = (
    *seams("gemma4", "a speculator registry (vLLM RFC #36219)", "",
        ("v1.worker.gpu.spec_decode.gemma4.speculator.Gemma4Speculator", "class", "TargetDependentARSpeculator", "its __new__ builds our subclass"),
        ("v1.worker.gpu.spec_decode.gemma4.speculator.Gemma4Speculator._setup_gemma4_kv_sharing", "order", "attn.kv_sharing_target_layer_name = target_layer_name", "its layers have no K/V of their own: no scratch"),
        ("model_executor.models.gemma4_mtp.Gemma4MTPAttention.forward", "order", "self.attn(q, None, None)", "a level writes no K/V"),
        ("model_executor.models.gemma4_mtp.Gemma4MTP", "has", "lm_head, logits_processor, masked_embedding", "an FP8 head or hot tokens need logits of all rows of the head"),
    ),
)

NGRAM = (
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
