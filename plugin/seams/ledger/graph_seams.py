"""What graphs of draft models and of vision encoders rely on."""

from vllm_graft.seams.ledger.entry import seams

_ENCODER = "a registry of encoder graph managers"

# Columns: path, kind, what is expected, why.
# fmt: off
DRAFT = (
    *seams("draft", "vLLM captures the loop of a draft model itself", "v1.worker.gpu",
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator", "has", "(DraftModelSpeculator), init_cudagraph_manager(self, cudagraph_mode, no other), capture(self, no other), _prefill(self, input_batch, num_rejected, last_sampled, num_reqs, skip_attn, num_tokens_across_dp, no other), _multi_step_decode(self, input_batch, num_rejected, num_reqs, skip_attn, num_tokens_across_dp, no other)", "its __new__ builds our subclass, which overrides these; the first two do nothing in vLLM"),
        ("spec_decode.standalone_ar.speculator.StandaloneARSpeculator", "order", "def _prefill(, prepare_prefill_inputs(, .compute_slot_mappings(, self._build_attn_metadata(, self._run_model(, self.sample_draft(, def _multi_step_decode(, self.num_speculative_steps), .compute_slot_mappings(, self._build_uniform_attn_metadata(, self._run_model(, self.sample_draft(", "the first pass and the loop themselves are captured, over stand-ins for their arguments"),
        ("spec_decode.speculator.DraftModelSpeculator", "has", "_update_draft_decode_metadata, arange_np, attn_groups, block_tables, device, draft_tokens, idx_mapping, input_buffers, kv_cache_config, max_model_len, max_num_reqs, model_state, num_speculative_steps, supports_decode_metadata_update, vllm_config, _build_uniform_attn_metadata, _build_attn_metadata(self, num_reqs, batch_desc, query_start_loc_np, seq_lens_cpu_upper_bound, step, slot_mappings=)", "what a capture needs; _build_attn_metadata: overridden: in a capture the metadata is there"),
        ("block_table.BlockTables.compute_slot_mappings", "call", "self, idx_mapping, query_start_loc, positions, num_tokens_padded", "padding writes no K/V: our captures give it index -1"),
    ),
)

VISION = (
    *seams("fused", "vLLM fuses these operators where encoders are not compiled", "model_executor",
        ("layers.activation.SiluAndMul", "name", "present", "the gate that is fused"),
        ("layers.layernorm.RMSNorm", "has", "has_weight, hidden_size, variance_epsilon, variance_size_override, weight", "a norm that is fused with the sum before it"),
        ("models.qwen2_5_vl.Qwen2_5_VisionAttention", "has", "attn, hidden_size_per_attention_head, num_attention_heads_per_partition, proj, qkv", "its products and attention are called"),
        ("models.qwen2_5_vl.Qwen2_5_VisionAttention.forward", "source", "(self, x, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen, sequence_lengths), c008d6726880", "done with queries and keys rotated in one kernel; bit for bit, which its text alone tells"),
        ("models.qwen2_5_vl.Qwen2_5_VisionMLP", "has", "act_fn, down_proj, gate_up_proj", "its products are called"),
        ("models.qwen2_5_vl.Qwen2_5_VisionMLP.forward", "source", "(self, x), ab47393ceb8b", "done with its gate in one kernel; bit for bit, which its text alone tells"),
        ("models.qwen2_5_vl.Qwen2_5_VisionBlock", "has", "attn, mlp, norm1, norm2", "its parts are called"),
        ("models.qwen2_5_vl.Qwen2_5_VisionBlock.forward", "source", "(self, x, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen), 2d80d6dc2d85", "replaced on the instances of one tower while its graphs are captured; bit for bit, which its text alone tells"),
        ("models.qwen3_vl.Qwen3_VisionBlock", "has", "attn, mlp, norm1, norm2", "likewise"),
        ("models.qwen3_vl.Qwen3_VisionTransformer.forward", "order", "in enumerate(self.blocks), self.deepstack_merger_list[, self.merger(hidden_states), torch.cat(", "mergers of inner layers run beside the blocks, and nothing waits for them before the last merger"),
        ("models.qwen3_vl.Qwen3_VisionBlock.forward", "source", "(self, x, cu_seqlens, rotary_pos_emb_cos, rotary_pos_emb_sin, max_seqlen, sequence_lengths), 73509c03fd7e", "likewise; bit for bit, which its text alone tells"),
    ),
    *seams("vit", _ENCODER, "",
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager", "has", "config, device, dtype, graph_hits, graph_misses, graph_pool, max_batch_size, max_frames_per_batch, model, token_budgets, use_dp, vllm_config, __init__(self, vllm_config, device, dtype, model, no other), capture(self, graph_pool, no other), clear(self, no other), _execute_local(self, mm_kwargs, no other)", "base of the runner; its __new__ builds the chosen one; __init__: likewise; reads the encoder_cudagraph_* options; capture, clear: overridden; _execute_local: overridden: one rank's share"),
        ("v1.worker.encoder_cudagraph.EncoderCudaGraphManager.execute", "order", "self.use_dp, self._dp_shard(, self._execute_local(, self._dp_gather(", "a data-parallel tower: called with our _execute_local"),
        ("v1.worker.encoder_cudagraph_defs.EncoderCudaGraphConfig", "has", "buffer_keys, capture_axes, modalities, out_hidden_size, paths", "what a model says of its encoder; an adapter's is made"),
        ("v1.worker.encoder_cudagraph_defs.EncoderItemSpec", "has", "input_size, output_tokens, get_path_output_tokens", "sizes of an item"),
        ("v1.worker.gpu.mm.encoder_runner.EncoderRunner", "has", "cudagraph_manager", "the proof that our runner is used"),
        ("v1.worker.gpu.mm.encoder_runner.EncoderRunner.execute_mm_encoder", "order", "cg_manager.execute(, is_captured(), supports_modality(, cudagraph_output is not None, self.model.embed_multimodal(", "None leaves a batch to the model's own path"),
        ("v1.worker.gpu.mm.encoder_runner.EncoderRunner.capture", "order", "graph_capture(, manager.capture(graph_pool=", "collectives are ready for capture"),
        ("v1.worker.gpu.model_states.interface.ModelState.__init__", "order", "supports_encoder_cudagraph(model), EncoderCudaGraphManager(", "wrapped: the adapter is attached before the model is asked"),
        ("v1.worker.gpu_model_runner.GPUModelRunner._create_encoder_cudagraph_manager", "order", "(self, no other), supports_encoder_cudagraph(raw_model), return EncoderCudaGraphManager(", "likewise, in Model Runner V1"),
        ("v1.worker.gpu_model_runner.GPUModelRunner", "has", "get_model, supports_mm_inputs", "likewise"),
        ("model_executor.models.interfaces.SupportsEncoderCudaGraph", "has", "encoder_cudagraph_forward, encoder_eager_forward, get_encoder_cudagraph_budget_range, get_encoder_cudagraph_config, get_encoder_cudagraph_item_specs, get_input_modality, get_max_frames_per_video, postprocess_encoder_output, prepare_encoder_cudagraph_capture_inputs, prepare_encoder_cudagraph_replay_buffers, select_encoder_cudagraph_items, supports_encoder_cudagraph, prepare_encoder_cudagraph_capture_inputs(self, token_budget, max_batch_size, max_frames_per_batch, device, dtype), prepare_encoder_cudagraph_replay_buffers(self, mm_kwargs, max_batch_size, max_frames_per_batch), postprocess_encoder_output(self, outputs, indices, per_item_out_tokens, dest, clone=, batch_mm_kwargs=)", "the protocol that towers speak; prepare_encoder_cudagraph_capture_inputs: bounds of host numbers, shape of pixels; prepare_encoder_cudagraph_replay_buffers: metadata of a batch; postprocess_encoder_output: embeddings of each item"),
        ("model_executor.models.interfaces.supports_encoder_cudagraph", "call", "model", "whether a model needs an adapter"),
        ("model_executor.layers.attention.mm_encoder_attention.MMEncoderAttention", "has", "_fp8_dynamic_scale, attn_backend", "what cannot be captured"),
        ("v1.attention.backends.registry.AttentionBackendEnum", "has", "FLASHINFER, TORCH_SDPA", "likewise"),
        ("v1.attention.ops.vit_attn_wrappers.flash_attn_maxseqlen_wrapper", "order", "current_platform.is_cuda() and torch.cuda.is_current_stream_capturing()", "zeros under captured attention are spared where every row is written"),
        ("v1.attention.ops.vit_attn_wrappers.current_platform", "name", "present", "replaced while a tower runs, to that end"),
        ("utils.gpu_sync_debug.gpu_sync_allowed", "call", "no parameter", "grids are read on the host"),
        ("config.LoRAConfig", "has", "enable_tower_connector_lora", "a tower with LoRA is not captured"),
        ("platforms.interface.Platform.support_static_graph_mode", "call", "cls", "a platform without graphs is refused"),
    ),
    *seams("pixtral", "vLLM captures Pixtral's tower (vLLM #56277)", "model_executor.models",
        ("mistral3.Mistral3ForConditionalGeneration._process_image_input", "order", "(self, image_input), self.vision_tower(, self.multi_modal_projector(, torch.split(image_embeds", "the adapter's pass follows it"),
        ("pixtral.PixtralForConditionalGeneration._process_image_input", "order", "(self, image_input), self.vision_encoder(images), self.pre_mm_projector_norm(image_features), self.patch_merger(, self.vision_language_adapter(image_features)", "likewise"),
        ("pixtral.PixtralHFVisionModel.forward", "order", "self.patch_conv(, self.ln_pre(patch_embeds), position_ids_in_meshgrid(, self.patch_positional_embedding(, self.transformer(, resolve_visual_encoder_outputs(", "likewise"),
        ("pixtral.VisionTransformer.forward", "order", "self.patch_conv(, self.ln_pre(patch_embeds), position_meshgrid(, self.freqs_cis[, self.transformer(", "likewise"),
        ("pixtral", "has", "_make_packed_sequence_metadata(sequence_lengths, attn_backend, hidden_size, tp_size, device), pixtral_patch_embed(images, weight, input_norm), position_ids_in_meshgrid(patch_embeds_list, max_width)", "_make_packed_sequence_metadata: segments of attention; pixtral_patch_embed: patches of images that are normalised on the device; position_ids_in_meshgrid: positions of patches; since 0.33 on their device"),
    ),
)
