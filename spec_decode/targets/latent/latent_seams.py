"""Rows of the ledger for trees on latents of MLA."""

from vllm_graft.seams.ledger.entry import Seam, seams

_TREE = "vLLM verifies trees itself"
_MASK = "an attention backend of vLLM's takes a mask per row"

# Columns: path, kind, what is expected, why.
# fmt: off
LATENT: tuple[Seam, ...] = (
    *seams("tree", _MASK, "model_executor.layers.attention.mla_attention",
        ("MLAAttention", "has", "get_attn_backend, head_size, impl, kv_cache, kv_cache_dtype, kv_lora_rank, num_heads, qk_nope_head_dim, qk_rope_head_dim, scale, sliding_window, _vllm_config, forward_impl(self, q, k_c_normed, k_pe, kv_cache, attn_metadata, output, output_scale=, output_block_scale=, quant_group_size=, quant_scale_ue8m0=, quant_col_major=, quant_tma_aligned=, q_dcp_replicated=), _v_up_proj(self, x, out)", "tree attention stands before its choice of a form; forward_impl: replaced on each layer of target and draft; _v_up_proj: turns weighted latents of tree rows into values"),
        ("MLAAttention.update_kv_cache", "order", "if slot_mapping is None", "a level of a draft has no slots, and writes no cache"),
        ("unified_mla_kv_cache_update", "order", "if layer_slot_mapping is not None", "likewise"),
        ("MLAAttention.process_weights_after_loading", "order", 'W_UV.transpose(0, 1), "W_UK_T", W_UK.permute(1, 2, 0)', "absorbs queries of tree rows"),
        ("unified_mla_attention_with_output", "order", "get_attention_context(layer_name), layer.forward_impl(", "looks it up on the layer at each call"),
        ("MLACommonMetadata", "has", "decode, max_query_len, max_seq_len, num_actual_tokens, num_reqs, prefill, query_start_loc", "rows of the verified requests"),
        ("MLACommonDecodeMetadata", "has", "block_table", "pages of the requests in one form"),
        ("MLACommonPrefillMetadata", "has", "block_table", "pages of the others"),
        ("MLACommonMetadataBuilder.build", "order", "block_table=block_table_tensor[reqs_start:, ...], block_table_tensor=block_table_tensor[:num_decodes, ...]", "they are parts of one table, in the batch's order"),
    ),
    *seams("tree", _MASK, "",
        ("v1.attention.backends.fa_utils.flash_attn_supports_mla", "name", "present", "whether FlashAttention 3 reads latents on this device"),
        ("config.compilation.PassConfig", "has", "fuse_attn_quant", "an output that is quantized by the layer is refused with MLA"),
    ),
    *seams("kimi", _TREE, "",
        ("models.kimi_k3.nvidia.mla.MultiHeadLatentAttention", "has", "get_attn_backend, head_size, impl, kv_cache, kv_cache_dtype, kv_lora_rank, layer_name, num_heads, qk_nope_head_dim, qk_rope_head_dim, rotary_emb, scale, _decode_concat_cache(self, ql_nope, q_pe, kv_c_normed, k_pe, positions, cos_sin_cache, slot_mapping), _attn_read_kv_cache(self), _v_up_proj(self, x, out)", "tree attention stands before its choice of a form; _decode_concat_cache: writes the latents of tree rows; _attn_read_kv_cache: the cache in the format that it is read in; _v_up_proj: turns weighted latents of tree rows into values"),
        ("models.kimi_k3.nvidia.mla.MultiHeadLatentAttention._attention", "order", "positions: torch.Tensor, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, attn_out: torch.Tensor, slot_mapping_by_layer[self.layer_name], torch.bmm(mqa_q_nope.transpose(0, 1), self.W_UK_T), self._decode_concat_cache(", "replaced on each layer of the target; it writes the cache itself"),
        ("models.kimi_k3.nvidia.mla.MultiHeadLatentAttention.process_weights_after_loading", "order", 'W_UV.transpose(0, 1), "W_UK_T", W_UK.permute(1, 2, 0)', "absorbs queries of tree rows"),
    ),
)
