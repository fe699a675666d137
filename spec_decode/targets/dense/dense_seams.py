"""Rows of the ledger for trees on plain attention."""

from vllm_graft.seams.ledger.entry import Seam, seams

_MASK = "an attention backend of vLLM's takes a mask per row"

# Columns: path, kind, what is expected, why.
# fmt: off
DENSE: tuple[Seam, ...] = (
    *seams("tree", _MASK, "",
        ("model_executor.layers.attention.Attention", "has", "attn_backend, attn_type, get_attn_backend, head_size, head_size_v, impl, kv_cache, kv_cache_dtype, kv_sharing_target_layer_name, num_heads, num_kv_heads", "tree attention is put over its impl"),
        ("model_executor.layers.attention.attention.set_default_quant_scales", "order", "layer._k_scale.fill_(1.0), layer._v_scale.fill_(1.0), layer._q_scale.fill_(1.0)", "_q_scale, _k_scale and _v_scale of a layer"),
        ("v1.kv_cache_interface.is_quantized_kv_cache", "call", "kv_cache_dtype", "whether K/V has scales"),
        ("v1.attention.backends.triton_attn.TritonAttentionImpl", "has", "num_heads, head_size, scale, num_kv_heads, kv_cache_dtype, logits_soft_cap, sliding_window, alibi_slopes, sinks", "its constructor's results are kept"),
        ("v1.attention.backends.triton_attn.TritonAttentionMetadata", "has", "query_start_loc, seq_lens, block_table, max_query_len, max_seq_len", "rows of the verified requests; the window that a draft sees of them"),
        ("v1.attention.backends.flash_attn.FlashAttentionImpl", "has", "num_heads, head_size, scale, num_kv_heads, kv_cache_dtype, logits_soft_cap, sliding_window, alibi_slopes, sinks, batch_invariant_enabled, supports_quant_query_input, vllm_flash_attn_version", "its constructor's results are kept; whether two passes can do"),
        ("v1.attention.backends.flash_attn.FlashAttentionMetadata", "has", "num_actual_tokens, scheduler_metadata, query_start_loc, seq_lens, block_table, max_query_len, max_seq_len", "rows of the verified requests; of prompts beside them; the window that a draft sees of them"),
        ("vllm_flash_attn.flash_attn_interface.flash_attn_varlen_func", "call", "q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=, softmax_scale=, causal=, window_size=, softcap=, block_table=, return_softmax_lse=, out=, scheduler_metadata=, q_descale=, k_descale=, v_descale=, num_splits=, fa_version=, s_aux=", "FlashAttention 3 over the keys before a tree; what it returns for latents is completed in place"),
        ("vllm_flash_attn.flash_attn_interface.get_scheduler_metadata", "call", "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=, headdim_v=, cu_seqlens_q=, cu_seqlens_k_new=, cache_leftpad=, page_size=, max_seqlen_k_new=, causal=, window_size=, has_softcap=, num_splits=, pack_gqa=, sm_margin=", "its plan, once a forward pass"),
        ("utils.torch_utils.canonicalize_singleton_dim_strides", "call", "t", "strides of one KV head, as FlashAttention wants them"),
    ),
    *seams("tree", _MASK, "",
        ("model_executor.layers.attention.chunked_local_attention.ChunkedLocalAttention", "has", "attention_chunk_size, attn_backend", "rows of trees see their own chunk; its backend is replaced by a subclass"),
        ("model_executor.layers.attention.chunked_local_attention.create_chunked_local_attention_backend", "order", "AttentionCGSupport.NEVER, make_local_attention_virtual_batches(, metadata = super().build(common_prefix_len, cm, fast_build)", "its metadata has a sequence per chunk, so that ours keeps the whole batch beside it"),
    ),
    *seams("tree", "vLLM's CPU attention reads plain paged K/V", "v1",
        ("attention.backend.AttentionBackend", "has", "forward_includes_kv_cache_update, get_builder_cls, get_impl_cls, get_name, get_supported_kernel_block_sizes, supported_dtypes, supported_kv_cache_layouts", "base of the plain attention for CPUs"),
        ("attention.backend.AttentionCGSupport", "has", "ALWAYS, NEVER", "likewise: it is never captured; what mixed graphs need"),
        ("attention.backend.AttentionImpl", "has", "(AttentionImplBase, Generic), forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=, no other)", "likewise; forward: tree rows go to our kernel, other rows to vLLM's"),
        ("attention.backend.AttentionMetadataBuilder", "has", "_cudagraph_support, supports_draft_decode_metadata_update, build(self, common_prefix_len, common_attn_metadata, fast_build=, no other), get_cudagraph_support(cls, vllm_config, kv_cache_spec)", "build: likewise; get_cudagraph_support: whether each layer's mixed batches can be captured"),
        ("attention.backend.CommonAttentionMetadata", "has", "block_table_tensor, max_query_len, max_seq_len, query_start_loc, seq_lens", "likewise"),
        ("attention.backend", "has", "MultipleOf, subclass_attention_backend(name_prefix, attention_backend_cls, builder_cls)", "likewise: block sizes; subclass_attention_backend: makes the subclass for chunks"),
        ("kv_cache_interface.KVCacheLayout", "has", "LBHNC", "the cache that it reads"),
    ),
)
