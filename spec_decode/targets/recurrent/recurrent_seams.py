"""Rows of the ledger for trees on recurrent layers."""

from vllm_graft.seams.ledger.entry import Seam, seams

_TREE = "vLLM verifies trees itself"

# Columns: path, kind, what is expected, why.
# fmt: off
RECURRENT: tuple[Seam, ...] = (
    *seams("recurrent", _TREE, "model_executor.layers.mamba",
        ("abstract.MambaBase", "name", "present", "tells recurrent layers from attention"),
        ("abstract.MambaBase.get_kv_cache_spec", "order", "num_speculative_blocks=", "a block of states for each row that drafts are verified in"),
        ("mamba_utils.is_conv_state_dim_first", "call", "no parameter", "layout of the windows of inputs"),
        ("mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape", "order", "conv_kernel_size - 1 + num_spec, head_v_dim, head_k_dim", "a window holds the inputs of all rows; states are [heads, V, K]"),
        ("mamba_utils.MambaStateDtypeCalculator.gated_delta_net_state_dtype", "call", "cls, model_dtype, mamba_cache_dtype, mamba_ssm_cache_dtype=", "bytes of a state, by which presets choose a number of nodes"),
        ("gdn.base.GatedDeltaNetAttention", "has", "activation, cache_config, model_config, num_spec, prefix, tp_size", "what the recurrence needs of a layer; the dtype of what it keeps"),
        ("gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention", "has", "A_log, conv1d, dt_bias, gdn_decode_kernel, num_k_heads, _forward_method", "likewise; its fused kernel for chains is switched off"),
        ("gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._forward_core", "order", "mixed_qkv: torch.Tensor, core_attn_out: torch.Tensor, spec_sequence_masks is None, conv_state_indices=spec_state_indices_tensor[:, 0], num_accepted_tokens=num_accepted_tokens, fused_sigmoid_gating_delta_rule_update(, use_qk_l2norm_in_kernel=True", "replaced on each layer of the target: what verified rows go through, ours does for trees"),
        ("gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode", "order", 'self.gdn_decode_kernel == "cuda"', "with another name every verified row goes through _forward_core"),
        ("gdn.qwen_gdn_linear_attn.qwen_gdn_attention_core", "order", "forward_context.no_compile_layers[layer_name], self._forward_core(", "looks it up on the layer at each call"),
        ("mamba_mixer2.MambaMixer2", "has", "A, D, activation, cache_config, conv1d, dt_bias, head_dim, kv_cache, n_groups, prefix, tp_size, tped_conv_size, tped_dt_size, tped_intermediate_size, use_replayssm", "what the recurrence of Mamba-2 needs of a layer"),
        ("mamba_mixer2.MambaMixer2.conv_ssm_forward", "order", "projected_states: torch.Tensor, output: torch.Tensor, self.tped_intermediate_size :, self.split_hidden_states_B_C_fn(, conv_state_indices=state_indices_tensor_d, num_accepted_tokens=num_accepted_tokens, dst_state_batch_indices=state_indices_tensor_d", "replaced on each layer of the target: what verified rows go through, ours does for trees"),
        ("mamba_mixer2.mamba_mixer2", "order", "forward_context.no_compile_layers[layer_name], self.conv_ssm_forward(", "looks it up on the layer at each call"),
        ("ops.mamba_ssm._selective_scan_update_kernel", "name", "present", "its arithmetic, which ours keeps: tests compare the bits"),
        ("ops.causal_conv1d._causal_conv1d_update_kernel", "name", "present", "its windows and the order of its sums, which ours keeps: tests compare the bits"),
    ),
    *seams("recurrent", _TREE, "",
        ("third_party.flash_linear_attention.ops.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update", "source", "(A_log, a, b, dt_bias, q, k, v), 7039e2f530f4", "its launch and its arithmetic, which ours keeps"),
        ("forward_context.get_forward_context", "call", "no parameter", "metadata of a layer"),
        ("v1.attention.backends.gdn_attn.GDNAttentionMetadata", "has", "non_spec_token_indx, num_accepted_tokens, num_actual_tokens, num_decode_tokens, num_decodes, num_prefill_tokens, num_prefills, num_spec_decode_tokens, num_spec_decodes, spec_query_start_loc, spec_sequence_masks, spec_sequence_masks_cpu, spec_state_indices_tensor, spec_token_indx, uniform_spec_sequence_length", "which rows are verified, and the columns of their states"),
        ("v1.attention.backends.gdn_attn.GDNAttentionMetadataBuilder.build", "order", "num_decodes > 0 and num_spec_decodes > 0, torch.argsort(spec_token_masks, stable=True)", "the other rows are prompts alone; both keep the batch's order"),
        ("v1.attention.backends.mamba2_attn.Mamba2AttentionMetadata", "has", "num_accepted_tokens, num_decode_tokens, num_decodes, num_prefills, query_start_loc_d, state_indices_tensor_d", "which rows are verified, and the columns of their states"),
        ("v1.attention.backends.mamba_attn.BaseMambaAttentionMetadataBuilder.build_for_cudagraph_capture", "order", "m.max_query_len == 1 + self.num_spec_tokens", "Mamba-2 is captured for one number of drafts: shape auto is refused"),
        ("v1.attention.backends.utils.mamba_get_block_table_tensor", "order", {"0.32": "seq_lens - 1) // kv_cache_spec.block_size, clamp_(min=0)", "0.33": "seq_lens - 1) // kv_cache_spec.block_size"}, "where a request's columns begin, with prefix caching"),
        ("v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState.postprocess_state", "order", "_scatter_num_accepted_kernel[, run_fused_postprocess_align(", "the next step starts from the last accepted row's column; copies are made here, after ours"),
        ("v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState.prepare_attn", "order", "input_batch.prefill_runs_as_decode_np, self.num_accepted_tokens_gpu[, num_draft_tokens_per_req, -1", "padded prompts that we name are verified; decodes without drafts stay verified rows"),
    ),
    *seams("kimi", _TREE, "",
        ("compilation.breakable_cudagraph.eager_break_during_capture", "call", "fn", "over our passes through these layers as over vLLM's: no PIECEWISE graph holds them"),
        ("model_executor.layers.mamba.mamba_utils.MambaStateShapeCalculator.kda_state_shape", "order", "conv_dim = proj_size + 2 * proj_k_size, conv_kernel_size - 1 + num_spec, head_dim, head_dim", "one window holds the inputs of all rows for queries, keys and values; states are [heads, V, K]"),
        ("model_executor.layers.mamba.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention", "has", "A_log, conv1d, dt_bias, gate_lower_bound, o_norm", "what the recurrence needs of a layer with Kimi Delta Attention"),
        ("model_executor.layers.mamba.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention.forward", "order", "self._forward(, mixed_qkv=mixed_qkv, g1=g1, g2=g2, beta=beta, core_attn_out=core_attn_out", "looks it up on the layer at each call"),
        ("model_executor.layers.mamba.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention._forward", "order", 'attn_metadata_raw.get(self.prefix), spec_sequence_masks is not None, activation="silu", conv_state_indices=spec_conv_indices, num_accepted_tokens=num_accepted_tokens, fused_recurrent_kda(, lower_bound=self.gate_lower_bound, core_attn_out.copy_(self.o_norm(core_attn_out, g2))', "replaced on each layer of the target: what verified rows go through, ours does for trees"),
        ("models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent.fused_recurrent_kda_fwd", "source", "(q, k, v, g, beta), 469fc02fb52c", "its launch and its arithmetic, which ours keeps: tests compare the bits"),
    ),
)
