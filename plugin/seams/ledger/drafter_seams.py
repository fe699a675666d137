"""What single drafters rely on beside what all trees do: blocks, MTP modules, n-grams."""

from vllm_graft.seams.ledger.entry import seams

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
        ("speculator.DFlashSpeculator", "has", "input_buffers, hidden_states, sample_indices, sample_pos, sample_idx_mapping, sample_from_anchor, num_speculative_steps, num_query_per_req, query_cudagraph_manager, _run_model(self, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, no other), _generate_draft(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, no other), _num_graph_context_tokens(self, num_reqs, no other)", "its __new__ builds our subclass; where the block lies, and its predicting positions, of which we set how many; _run_model: the one pass; _generate_draft: overridden: grows a tree where it samples a chain; _num_graph_context_tokens: overridden: a verified tree has more rows than a block"),
        ("speculator.DFlashSpeculator.__init__", "order", "(self, vllm_config, device), super().__init__(, self.num_query_per_req = 1 + self.num_speculative_steps, self.sample_indices = torch", "given a configuration whose number of tokens is the depth; our buffers replace what that is too small for"),
        ("speculator.DFlashSpeculator.init_cudagraph_manager", "order", "(self, cudagraph_mode), self.query_cudagraph_manager = DFlashCudaGraphManager(, decode_query_len=self.num_query_per_req", "its graphs are those of a step with a tree"),
        ("speculator.DFlashSpeculator.capture", "order", "(self), self.sample_idx_mapping.fill_(-1), self.query_cudagraph_manager.capture(, self._generate_draft", "captures our _generate_draft, all requests padding"),
        ("speculator.DFlashSpeculator.propose", "order", "num_query_tokens = num_reqs * self.num_query_per_req, prepare_dflash_inputs(, self.query_cudagraph_manager, uniform_token_count=self.num_query_per_req, self._generate_draft(", "called with the accepted path at the front, with combined states, and with the length and the graphs of this step's block"),
        ("speculator._prepare_dflash_inputs_kernel", "name", "present", "takes the first rows of a request for its context, and writes request-state indices k by k"),
        ("cudagraph.DFlashCudaGraphManager.capture", "order", "num_reqs = desc.num_reqs or, super().capture(", "the graphs that hold the tree, one manager for each number of nodes: of the numbers of requests that we plan"),
        ("utils.load_dflash_model", "order", "draft_vllm_config = replace(, vllm_config=draft_vllm_config", "derives a configuration from ours, which is validated again"),
    ),
    *seams("block", "a speculator registry (vLLM RFC #36219)", "v1.worker.gpu.spec_decode",
        ("dflash2.speculator.DFlash2Speculator", "has", "(DFlashSpeculator), _score_candidates(self, candidate_ids, unary_logits, hidden_states), _generate_draft(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, no other)", _EDGES),
        ("lilicorr.speculator.LiLiCorrSpeculator", "has", "(DFlash2Speculator), prepare_context_anchor", "its __new__ builds our subclass; reads the last accepted row, which we have moved: another would cost acceptance alone"),
        ("dspark.speculator.DSparkSpeculator", "has", "_draft_topk, _sample_sequential(self, num_reqs, head_hidden), _generate_draft(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, no other)", "how many logits get a bias; overridden: a tree for its chain. Drafts by another bias would cost acceptance alone"),
    ),
    *seams("block", "a speculator registry (vLLM RFC #36219)", "",
        ("v1.worker.gpu.spec_decode.xpress.speculator.XPressSpeculator", "has", {"0.33": "(DFlashSpeculator), _jacobi_refine(self, num_reqs, head_hidden), _generate_draft(self, num_reqs, num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode=, no other)"}, _PATH),
        ("model_executor.models.qwen3_xpress.XPressRefinerHead", "has", {"0.33": "hidden_cache, in_proj, mix_L, mlp_down, mlp_gate, mlp_up, rank, topc, w1, w2, _refine_latent(self, prev_ids, hcache), jacobi_refine_greedy(self, base_logits_full, h_full, anchor_ids, tok_am1_ids, num_passes)"}, "_refine_latent: the bias by the tokens of a path, for each node of a level; jacobi_refine_greedy: which tokens get a bias, and which token stands before the last one"),
        ("model_executor.models.qwen3_xpress.Qwen3XPressModel.__init__", "order", {"0.33": "xpress_block_size, num_speculative_steps, 15, xpress_rank, 256, xpress_mlp_hidden, 512, xpress_topc, 512"}, "the sizes of a refiner whose checkpoint doesn't say them"),
        ("model_executor.models.qwen3_xpress.Qwen3XPressForCausalLM", "has", {"0.33": "compute_draft_logits, lm_head, logits_processor"}, "the logits before the bias"),
    ),
    *seams("block", "vLLM's heads offer their best k tokens", "model_executor.models",
        ("qwen3_dflash.DFlashQwen3ForCausalLM", "has", "combine_hidden_states, compute_logits, draft_id_to_target_id, lm_head, logits_processor", "top k of all positions at once"),
        ("qwen3_dflash2.DFlash2Qwen3ForCausalLM.compute_candidates", "call", "self, hidden_states", "the candidates of each position, tokens of the target"),
        ("qwen3_dflash2.DFlash2Qwen3DecoderLayer.__init__", "order", "block_size=1 + speculative_config.num_speculative_tokens", "tells positions by the length of a block that it was loaded for: not shortened"),
        ("qwen3_dflash2._score_edges", "call", "predecessor_table, successor_table, candidate_ids, unary_logits, hidden, anchor_token_ids, top_k", "the first axis of candidates is that of the position before"),
        ("qwen3_dspark.Qwen3DSparkForCausalLM", "has", "apply_markov_bias_gathered, compute_draft_logits, markov_bias, markov_embed", _BIAS),
    ),
)

MTP = (
    *seams("mtp", "a speculator registry (vLLM RFC #36219)", "",
        ("v1.worker.gpu.spec_decode.mtp.speculator.MTPSpeculator", "has", "advance_draft_positions, on_multi_step_decode_begin, capture", "its __new__ builds our subclass; one pass per level, as EAGLE's"),
    ),
    *seams("mtp", "vLLM's heads offer their best k tokens", "model_executor.models",
        ("mimo_mtp.MiMoMultiTokenPredictor", "order", "self.embed_tokens, self.logits_processor, def compute_logits(, self.logits_processor(lm_head, hidden_states)", _HEAD),
        ("ernie_mtp.ErnieMultiTokenPredictor", "order", "self.embed_tokens, self.logits_processor, def compute_logits(, self.logits_processor(lm_head, hidden_states)", _HEAD),
        ("glm4_moe_mtp.Glm4MoeMultiTokenPredictor", "order", "self.embed_tokens, self.logits_processor, def compute_logits(, self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
        ("deepseek_mtp.DeepSeekMultiTokenPredictor", "order", "self.embed_tokens, self.logits_processor, def compute_logits(, self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
        ("hy_v3_mtp.HYV3MultiTokenPredictor", "order", "self.embed_tokens, self.logits_processor, def compute_logits(, self.logits_processor(, shared_head.head, mtp_layer.shared_head(hidden_states)", _HEAD),
    ),
)

GEMMA4 = (
    *seams("gemma4", "a speculator registry (vLLM RFC #36219)", "",
        ("v1.worker.gpu.spec_decode.gemma4.speculator.Gemma4Speculator", "has", "advance_draft_positions, on_multi_step_decode_begin, capture", "its __new__ builds our subclass"),
        ("v1.worker.gpu.spec_decode.gemma4.speculator.Gemma4Speculator._setup_gemma4_kv_sharing", "order", "attn.kv_sharing_target_layer_name = target_layer_name", "its layers have no K/V of their own: no scratch"),
        ("model_executor.models.gemma4_mtp.Gemma4MTPAttention.forward", "order", "self.attn(q, None, None)", "a level writes no K/V"),
        ("model_executor.models.gemma4_mtp.Gemma4MTP", "has", "lm_head, logits_processor, masked_embedding", "an FP8 head or hot tokens need logits of all rows of the head"),
    ),
)

NGRAM = (
    *seams("ngram", "a speculator registry (vLLM RFC #36219)", "v1.worker.gpu.spec_decode",
        ("ngram.speculator.NgramGPUSpeculator", "has", "(BaseSpeculator), init_cudagraph_manager(self, cudagraph_mode, no other), propose(self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds, dp_sync_state=, dummy_run=, num_speculative_tokens=)", "its __new__ builds our subclass; called before we plan our graphs; the last tokens are its eighth argument"),
        ("speculator.DraftModelSpeculator.load_model", "order", "(self, target_model), self.load_draft_model(target_model", "asks load_draft_model for a model, which may have no layers"),
        ("speculator.DraftModelSpeculator.set_attn", "order", "init_attn_backend(, active_layer_names=self.draft_attn_layer_names", "makes no attention groups for a draft without layers"),
    ),
)
