"""The ledger: every vLLM symbol that we touch or rely on, once, with what we expect of it.

To add one, add a line; `vllm_graft.seams` compares. Symbols are named by the path that we import
them from. A test looks through our sources for imports that are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TESTED_VLLM = "0.32"
"""The vLLM minor version for which the ledger was written."""

Kind = Literal["class", "call", "source", "order", "has", "name", "module"]


@dataclass(frozen=True)
class Seam:
    """One upstream symbol.

    Attributes:
        part: who needs it: ``core``, ``eagle``, ``hicache``, ``native`` (our parts of the host KV
            cache in vLLM's own connector), ``testing``.
        path: dotted path, below ``vllm.``.
        kind: how it is compared. ``class``: the names of its bases; ``call``: parameter names,
            ``=`` after those with a default; ``source``: hash of its source, where we rely on
            what the body does; ``order``: texts that its source holds in this order; ``has``:
            members, fields or attributes of a class that we read; ``name``: it exists;
            ``module``: it is there, and is not imported to look.
        expected: what ``kind`` yields on a vLLM that we know.
        why: what we do with it.
        until: what would make it unnecessary.
    """

    part: str
    path: str
    kind: Kind
    expected: str
    why: str
    until: str


Row = tuple[str, Kind, str, str]


def _seams(part: str, until: str, prefix: str, *rows: Row) -> Iterator[Seam]:
    for path, kind, expected, why in rows:
        yield Seam(part, f"{prefix}.{path}" if prefix else path, kind, expected, why, until)


_CONFIG_API = "a configuration hook for general plugins"
_STATE_API = "a ModelState hook for plugins"
_PROPOSER_API = "a speculator registry (vLLM RFC #36219)"
_TREE = "vLLM verifies trees itself"
_MASK = "an attention backend of vLLM's takes a mask a row"
_TIER_API = "a stable API for tiers and cache policies"
_GPU_FREE = "vLLM tests Model Runner V2 on a CPU"

_METADATA = "query_start_loc, seq_lens, block_table, max_query_len, max_seq_len"
_IMPL = "num_heads, head_size, scale, num_kv_heads, kv_cache_dtype, logits_soft_cap, sliding_window, alibi_slopes, sinks"

# Columns: path, kind, what is expected, why.
# fmt: off
LEDGER: tuple[Seam, ...] = (
    *_seams("core", _CONFIG_API, "",
        ("__version__", "name", "present", "told in errors and reports"),
        ("platforms.current_platform", "name", "present", "its class is the one to hook"),
        ("platforms.interface.Platform", "has", "device_type, check_and_update_config", "told by the doctor, hooked"),
        ("platforms.interface.Platform.check_and_update_config", "call", "cls, vllm_config", "wrapped on the current platform's class to read our key"),
        ("plugins.load_general_plugins", "call", "no parameter", "calls register() in every process"),
    ),
    *_seams("core", _CONFIG_API, "config",
        ("VllmConfig", "has", "additional_config, cache_config, compilation_config, kv_transfer_config, load_config, model_config, parallel_config, scheduler_config, speculative_config, use_v2_model_runner, watermark_config, weight_transfer_config", "our key, and what is refused beside it; the KV's namespace"),
        ("ModelConfig", "has", "dtype, enable_trace_replay, hf_config, hf_text_config, is_attention_free, is_encoder_decoder, is_hybrid, logits_processors, max_model_len, model, quantization, return_sampling_mask, revision, seed, use_mla, uses_alibi", "targets and features that are refused; the KV's namespace"),
        ("ParallelConfig", "has", "data_parallel_index, decode_context_parallel_size, enable_batch_sharded_sampling, enable_expert_parallel, pipeline_parallel_size, prefill_context_parallel_size, tensor_parallel_size, use_ubatching, worker_extension_cls", "what is refused; our extension is set; the KV's namespace"),
        ("SchedulerConfig", "has", "max_num_batched_tokens, max_num_seqs", "the draft's levels have to fit"),
        ("SpeculativeConfig", "has", "draft_model_config, draft_sample_method, enable_adaptive_verification, method, num_speculative_tokens, num_speculative_tokens_per_batch_size, parallel_drafting, rejection_sample_method, target_model_config, use_local_argmax_reduction", "nodes of a tree; what is refused; the KV's namespace"),
        ("CompilationConfig", "has", "cudagraph_mode, static_forward_context", "graphs of mixed batches are refused; finds the layers' K/V"),
        ("CUDAGraphMode", "has", "FULL, FULL_DECODE_ONLY, NONE, decode_mode", "which graphs the draft captures"),
        ("compilation.CUDAGraphMode", "name", "present", "the same class, in annotations"),
    ),
    *_seams("core", "workers can report to plugins", "v1.worker.worker_base.WorkerWrapperBase",
        ("initialize_from_config", "call", "self, kv_cache_configs", "wrapped to check, after loading, that what was asked for runs"),
        ("init_worker", "order", "load_general_plugins(), worker_extension_cls", "runs register() before it resolves the worker extension"),
    ),
    *_seams("core", "workers can report to plugins", "v1.worker",
        ("worker_base.WorkerWrapperBase", "has", "vllm_config, worker", "configuration and worker that are checked"),
        ("gpu_worker.Worker", "has", "model_runner", "likewise"),
    ),
    *_seams("core", _STATE_API, "v1.worker.gpu",
        ("model_states.resolve_model_state_cls", "source", "b8eb2cbfe646", "asks model.get_model_state_cls first"),
        ("model_states.interface.ModelState", "has", "device, vllm_config", "our mixins stack over it"),
        ("model_runner.GPUModelRunner", "has", "speculator", "the proof that our proposer runs"),
    ),
    *_seams("eagle", _PROPOSER_API, "v1.worker.gpu",
        ("model_runner.GPUModelRunner.load_model", "order", "self.speculator.load_model(, init_model_state(, custom_sampler(", "we compose ModelState while the draft is loaded"),
        ("model_runner.GPUModelRunner.execute_model", "order", "self.prepare_attn(input_batch), self.model_state.preprocess_state(, self.model_state.prepare_attn(, self.model_state.prepare_inputs(", "slots are mapped before positions become depths"),
        ("model_runner.GPUModelRunner.sample_tokens", "order", "self.sample(, self.postprocess_sampled(, self.speculator.propose(", "K/V is compacted between verification and drafting"),
        ("model_runner.GPUModelRunner.postprocess_sampled", "order", "post_update(, self.model_state.postprocess_state(", "told how many tokens each request emitted"),
        ("spec_decode.init_speculator", "source", "f13c1922fef4", "looks EagleSpeculator up when it is called"),
        ("spec_decode.eagle.speculator.EagleSpeculator", "class", "TargetDependentARSpeculator", "its __new__ builds the chosen proposer"),
    ),
    *_seams("eagle", _PROPOSER_API, "v1.worker.gpu.spec_decode.target_dependent_ar.speculator",
        ("TargetDependentARSpeculator", "has", "attn_groups, block_tables, decode_cudagraph_manager, device, dp_rank, dp_size, draft_attn_layer_names, draft_tokens, dtype, hidden_size, hidden_states, idx_mapping, input_buffers, max_model_len, max_num_reqs, max_num_tokens, model, num_speculative_steps, supports_mm_inputs, vllm_config", "state of the proposer that ours reads or sets"),
        ("TargetDependentARSpeculator.__init__", "call", "self, vllm_config, device", "buffers of the extend pass"),
        ("TargetDependentARSpeculator.load_model", "call", "self, target_model", "last call before ModelState is chosen"),
        ("TargetDependentARSpeculator.init_cudagraph_manager", "call", "self, cudagraph_mode", "our graph runner is made with vLLM's"),
        ("TargetDependentARSpeculator.capture", "source", "24c6b1d3f39a", "with one step it captures the extend pass alone"),
        ("TargetDependentARSpeculator.propose", "source", "e0fe323467e0", "with one step it is the extend pass alone; called with the accepted path at the front"),
        ("TargetDependentARSpeculator._prefill", "source", "8ae36f81073a", "asks sample_draft for the first level; leaves state and position of the last row at the front"),
        ("prepare_prefill_inputs", "call", "last_token_indices, current_draft_step, input_buffers, input_batch, num_sampled, num_rejected, last_sampled, next_prefill_tokens, max_num_reqs", "shifts the ids that we gathered by one"),
    ),
    *_seams("eagle", _PROPOSER_API, "v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator",
        ("sample_draft", "call", "self, hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step, draft_logits, spec_step_idx=", "overridden: yields a level instead of a token"),
        ("_copy_request_inputs", "source", "4f36eb374c8f", "request-state index -1 for padding and dummy runs"),
        ("_build_uniform_batch_dp_sync", "source", "041fe8eb5a1f", "rows that data-parallel ranks agree on"),
        ("_prepare_eplb_forward", "call", "self, num_unpadded_tokens", "called before each pass of the draft"),
    ),
    *_seams("eagle", _PROPOSER_API, "",
        ("config.get_layers_from_vllm_config", "call", "vllm_config, layer_type, layer_names=", "layers of target and draft"),
        ("forward_context.set_forward_context", "call", "attn_metadata, vllm_config, num_tokens=, num_tokens_across_dp=, cudagraph_runtime_mode=, batch_descriptor=, ubatch_slices=, slot_mapping=, skip_compiled=, is_padding=", "runs a level of the draft"),
        ("forward_context.BatchDescriptor", "has", "num_tokens", "size of a level"),
        ("v1.worker.gpu.dp_utils.DPSyncState", "has", "num_tokens_across_dp", "rows of the other ranks"),
        ("v1.spec_decode.dynamic.utils.build_dynamic_sd_schedule_lookup", "call", "num_speculative_tokens_per_batch_size, vllm_max_batch_size, vllm_num_speculative_tokens", "nodes that are kept, by batch size"),
        ("v1.worker.gpu.dp_utils.dispatch_cg_and_sync_dp", "call", "cudagraph_manager, num_reqs, num_tokens, uniform_token_count, dp_size, dp_rank, max_query_len=, need_eager=, num_active_loras=, parallel_config=, allow_ubatching=, uniform_decode=, dp_sync_state=", "graph and padding of the levels"),
        ("v1.worker.gpu.input_batch.InputBuffers", "has", "input_ids, positions", "dtype of tokens; where the trees start"),
        ("v1.worker.gpu.block_table.BlockTables", "has", "input_block_tables, slot_mappings", "the draft's prefix; slots to compact"),
        ("v1.worker.utils.AttentionGroup", "has", "kv_cache_group_id, layer_names", "block table of a layer"),
        ("v1.worker.utils.AttentionGroup.map_to_kernel_block_table", "call", "self, block_table, ubatch_idx=", "block table in blocks of the kernel"),
        ("v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor", "has", "cg_mode, num_reqs, num_tokens", "which graph serves a batch"),
        ("v1.worker.gpu.cudagraph_utils.CudaGraphManager", "has", "graphs", "base of the graph runner; counted in graft_info"),
        ("v1.worker.gpu.cudagraph_utils.CudaGraphManager.__init__", "call", "self, vllm_config, device, cudagraph_mode, decode_query_len, lora_capture_cases=, varlen_decode=, ubatch_runner=", "sizes: capture sizes in rows of topk"),
        ("v1.worker.gpu.cudagraph_utils.CudaGraphManager.capture", "call", "self, create_forward_fn, progress_bar_desc=", "captures the levels"),
        ("v1.worker.gpu.cudagraph_utils.CudaGraphManager.run_fullgraph", "call", "self, desc", "replays the levels"),
        ("v1.worker.gpu.cudagraph_utils.profile_cudagraph_memory", "order", "vars(speculator).items(), isinstance(value, CudaGraphManager)", "finds, measures and drops our graphs by their class"),
    ),
    *_seams("eagle", "vLLM's heads offer their best k tokens", "",
        ("model_executor.models.llama_eagle3.Eagle3LlamaForCausalLM", "has", "combine_hidden_states, compute_logits, draft_id_to_target_id, embed_input_ids, lm_head, logits_processor", "top k in the draft's own vocabulary"),
        ("model_executor.layers.logits_processor.LogitsProcessor", "has", "org_vocab_size, scale, soft_cap", "hot tokens: the rest of the head after the cut projection"),
        ("model_executor.layers.logits_processor.LogitsProcessor.forward", "source", "180ac5dcb521", "hot tokens: soft cap, then scale"),
        ("model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding", "has", "shard_indices, tp_size", "hot tokens: rows of a sharded head"),
        ("model_executor.layers.vocab_parallel_embedding.VocabParallelEmbeddingShardIndices", "has", "org_vocab_start_index, org_vocab_end_index", "likewise"),
        ("distributed.tensor_model_parallel_all_reduce", "call", "input_", "likewise"),
    ),
    *_seams("eagle", _TREE, "v1.worker.gpu.model_states",
        ("interface.ModelState.add_request", "call", "self, req_index, new_req_data", "notes requests that need a linear history"),
        ("interface.ModelState.initialize_kv_cache", "call", "self, kv_cache_config, block_tables", "finds the layers' K/V tensors for compaction"),
        ("interface.ModelState.preprocess_state", "call", "self, input_batch, block_tables, kv_cache_config, num_computed_tokens", "positions and masks of tree rows, before metadata"),
        ("interface.ModelState.postprocess_state", "call", "self, idx_mapping, num_sampled, num_computed_tokens=", "moves the accepted path's K/V, before drafting"),
        ("interface.ModelState.prepare_inputs", "call", "self, input_batch, req_states", "M-RoPE positions of tree rows"),
        ("interface.ModelState.prepare_attn", "call", "self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, for_capture=, ubatch_idx=", "chooses who computes attention in the coming pass"),
        ("interface.ModelState.custom_sampler", "call", "self, sampler", "puts tree verification in place of the chain's"),
        ("default.DefaultModelState", "has", "rope_state", "whether positions have several dimensions"),
    ),
    *_seams("eagle", _TREE, "v1",
        ("worker.gpu.input_batch.InputBatch", "has", "cu_num_logits, cu_num_logits_np, expanded_idx_mapping, expanded_local_pos, idx_mapping, idx_mapping_np, input_ids, logits_indices, num_draft_tokens, num_draft_tokens_per_req, num_reqs, num_reqs_after_padding, num_tokens_after_padding, positions, query_start_loc, seq_lens, seq_lens_cpu_upper_bound", "rows of a step"),
        ("core.sched.output.NewRequestData", "has", "sampling_params", "whether a request needs a linear history"),
        ("kv_cache_interface.KVCacheConfig", "has", "hash_block_size, kv_cache_groups, kv_cache_layout", "layers of a group; the KV's namespace"),
        ("kv_cache_interface.KVCacheGroupSpec", "has", "kv_cache_spec, layer_names", "likewise; the KV's namespace"),
        ("outputs.LogprobsTensors", "name", "present", "logprobs along the path"),
        ("worker.gpu.buffer_utils.UvaBackedTensor", "has", "gpu", "prefill_len on the device"),
        ("worker.gpu.states.RequestState", "has", "prefill_len", "drafts behind an unfinished prompt are placeholders"),
        ("worker.gpu.input_batch.get_num_sampled_and_rejected", "call", "num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len", "counts accepted and rejected rows"),
        ("worker.gpu.metrics.logits.get_num_nans", "call", "logits", "as the chain's verification does"),
        ("worker.gpu.sample.output.SamplerOutput", "has", "logprobs_tensors, num_nans, num_rejected, num_sampled, sampled_token_ids", "what verification returns"),
        ("worker.gpu.sample.sampler.Sampler", "has", "compute_nans, logits_processors, logprobs_mode, req_states, sampling_states", "sampling state of the requests; foreign processors are refused"),
        ("worker.gpu.sample.sampler.Sampler.sample", "call", "self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np, return_logprobs=", "draws the target's token at every node"),
        ("worker.gpu.sample.states.NO_LOGPROBS", "name", "present", "no request wants logprobs"),
        ("worker.gpu.sample.states.SamplingStates.max_num_logprobs", "call", "self, idx_mapping_np", "how many logprobs are wanted"),
        ("worker.gpu.spec_decode.rejection_sampler.RejectionSampler", "class", "object", "base of tree verification"),
        ("worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__init__", "call", "self, sampler, spec_config, device, watermark_key=", "likewise"),
        ("worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__", "call", "self, logits, input_batch, draft_logits=, invalid_drafts=", "the runner's call in each step"),
        ("worker.gpu.spec_decode.rejection_sampler.RejectionSampler._get_logprobs_tensors", "source", "2cadc455547d", "logprobs of rows in a chain's order"),
        ("worker.gpu.spec_decode.rejection_sampler.get_max_chunk_logits", "call", "vocab_size", "rows of float32 logits at a time"),
    ),
    *_seams("eagle", _TREE, "",
        ("config.model.PROCESSED_LOGPROBS_MODES", "name", "present", "whether logprobs are of processed logits"),
        ("sampling_params.SamplingParams", "has", "bad_words, frequency_penalty, presence_penalty, repetition_penalty, structured_outputs, thinking_token_budget", "needs a linear history"),
    ),
    *_seams("eagle", _MASK, "",
        ("model_executor.layers.attention.Attention", "has", "attn_backend, attn_type, get_attn_backend, head_size, head_size_v, impl, kv_cache, kv_cache_dtype, kv_sharing_target_layer_name, num_heads, num_kv_heads", "tree attention is put over its impl"),
        ("model_executor.layers.attention.attention.set_default_quant_scales", "source", "8af21380c150", "_q_scale, _k_scale and _v_scale of a layer"),
        ("utils.torch_utils.is_quantized_kv_cache", "call", "kv_cache_dtype", "whether K/V has scales"),
        ("v1.attention.backend.AttentionImpl.forward", "call", "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, output_block_scale=", "tree rows go to our kernel, other rows to vLLM's"),
        ("v1.attention.backends.triton_attn.TritonAttentionImpl", "has", _IMPL, "its constructor's results are kept"),
        ("v1.attention.backends.triton_attn.TritonAttentionMetadata", "has", _METADATA, "rows of the verified requests"),
        ("v1.attention.backends.flash_attn.FlashAttentionImpl", "has", _IMPL, "its constructor's results are kept"),
        ("v1.attention.backends.flash_attn.FlashAttentionMetadata", "has", _METADATA, "rows of the verified requests"),
    ),
    *_seams("eagle", "vLLM's CPU attention reads plain paged K/V", "v1",
        ("attention.backend.AttentionBackend", "has", "forward_includes_kv_cache_update, get_builder_cls, get_impl_cls, get_name, get_supported_kernel_block_sizes, supported_dtypes, supported_kv_cache_layouts", "base of the plain attention for CPUs"),
        ("attention.backend.AttentionCGSupport", "has", "NEVER", "likewise: it is never captured"),
        ("attention.backend.AttentionImpl", "class", "AttentionImplBase, Generic", "likewise"),
        ("attention.backend.AttentionMetadataBuilder", "has", "_cudagraph_support, supports_draft_decode_metadata_update", "likewise"),
        ("attention.backend.AttentionMetadataBuilder.build", "call", "self, common_prefix_len, common_attn_metadata, fast_build=", "likewise"),
        ("attention.backend.AttentionType", "has", "DECODER", "likewise"),
        ("attention.backend.CommonAttentionMetadata", "has", "block_table_tensor, max_query_len, max_seq_len, query_start_loc, seq_lens", "likewise"),
        ("attention.backend.MultipleOf", "name", "present", "likewise: block sizes"),
        ("kv_cache_interface.KVCacheLayout", "has", "LBHNC", "the cache that it reads"),
    ),
    *_seams("hicache", "vLLM's connector API becomes stable", "distributed.kv_transfer.kv_connector",
        ("factory.KVConnectorFactory", "has", "_registry, register_connector", "our names are registered"),
        ("factory.KVConnectorFactory.register_connector", "call", "cls, name, module_path, class_name", "likewise"),
        ("v1.base.KVConnectorBase_V1", "has", "_connector_metadata, _kv_transfer_config, _vllm_config, build_kv_connector_stats, build_prom_metrics, get_required_kvcache_layout, has_pending_push_work, requires_kv_delivery, requires_piecewise_for_cudagraph, reset_cache", "base of our connector"),
        ("v1.base.KVConnectorBase_V1.__init__", "call", "self, vllm_config, role, kv_cache_config", "built once a process and role"),
        ("v1.base.KVConnectorBase_V1.register_kv_caches", "call", "self, kv_caches", "gives the layers' views of the KV cache"),
        ("v1.base.KVConnectorBase_V1.handle_preemptions", "call", "self, kv_connector_metadata", "every step, before blocks are overwritten: early stores, fences"),
        ("v1.base.KVConnectorBase_V1.start_load_kv", "call", "self, forward_context, **kwargs", "loads; attn_metadata is passed in steps of a FULL graph alone"),
        ("v1.base.KVConnectorBase_V1.wait_for_layer_load", "call", "self, layer_name", "called by attention layers, not in FULL graphs"),
        ("v1.base.KVConnectorBase_V1.finish_forward", "call", "self", "behind the target's forward pass"),
        ("v1.base.KVConnectorBase_V1.wait_for_save", "call", "self", "stores of a step"),
        ("v1.base.KVConnectorBase_V1.get_transfer_results", "call", "self, finished_req_ids", "ended loads, failed ones among them"),
        ("v1.base.KVConnectorBase_V1.build_connector_worker_meta", "call", "self", "reports of the ranks"),
        ("v1.base.KVConnectorBase_V1.get_num_new_matched_tokens", "call", "self, request, num_computed_tokens", "offers a hit"),
        ("v1.base.KVConnectorBase_V1.update_state_after_alloc", "call", "self, request, blocks, num_external_tokens", "blocks of an accepted offer"),
        ("v1.base.KVConnectorBase_V1.build_connector_meta", "call", "self, scheduler_output", "work of a step"),
        ("v1.base.KVConnectorBase_V1.update_connector_output", "call", "self, connector_output", "takes in reports"),
        ("v1.base.KVConnectorBase_V1.on_new_request", "call", "self, request", "prefetch at arrival"),
        ("v1.base.KVConnectorBase_V1.bind_gpu_block_pool", "call", "self, gpu_block_pool", "what the device has is not read from storage"),
        ("v1.base.KVConnectorMetadata", "name", "present", "base of a step's work"),
        ("v1.base.KVConnectorWorkerMetadata", "name", "present", "base of a rank's report"),
        ("v1.base.KVConnectorRole", "name", "present", "scheduler or rank"),
        ("v1.base.SupportsHMA", "name", "present", "keeps the hybrid memory manager on"),
        ("v1.base.KVConnectorTransferResults", "has", "failed_recving, finished_recving", "what a rank says of its loads"),
        ("v1.metrics.KVConnectorStats", "has", "aggregate, data, is_empty, reduce, reset", "base of our counters"),
        ("v1.metrics.KVConnectorPromMetrics", "has", "_counter_cls, _gauge_cls, observe", "base of our Prometheus series"),
    ),
    *_seams("hicache", "vLLM's connector API becomes stable", "v1",
        ("worker.gpu.kv_connector.ActiveKVConnector.pre_forward", "source", "013ca147a26d", "loads within a step are submitted before its forward pass"),
        ("worker.gpu.kv_connector.ActiveKVConnector.post_forward", "source", "6d5cb96e2745", "stores are submitted behind sampling and drafting"),
        ("worker.gpu.kv_connector.ActiveKVConnector._build_load_kwargs", "source", "3a289afc5c39", "attn_metadata tells a FULL graph"),
        ("core.sched.scheduler.Scheduler._handle_failed_recving", "source", "6a9b341e3c13", "a failed load is recomputed or ends the request"),
        ("core.sched.scheduler.Scheduler._update_from_kv_xfer_finished", "source", "63f9be6ccea1", "reports come before ended loads"),
        ("core.sched.output.SchedulerOutput", "has", "finished_req_ids, kv_cache_block_copies, kv_connector_block_state, new_block_ids_to_zero, num_scheduled_tokens, scheduled_cached_reqs, scheduled_new_reqs, total_num_scheduled_tokens", "what a step computes, and which blocks it hands out"),
        ("core.sched.output.KVConnectorBlockState", "has", "boundary_state_offloads, get_block_ids", "block tables; recurrent states to store"),
        ("core.kv_cache_manager.KVCacheBlocks", "has", "get_block_ids", "blocks of an accepted offer"),
        ("core.block_pool.BlockPool.get_cached_block", "call", "self, block_hash, kv_cache_group_ids", "what the device has"),
        ("request.Request", "has", "block_hashes, lora_request, num_computed_tokens, num_tokens, request_id, skip_reading_prefix_cache", "keys and progress of a request"),
        ("outputs.KVConnectorOutput", "has", "invalid_block_ids, kv_connector_worker_meta", "reports of the ranks; what another connector failed to load"),
        ("request.RequestStatus", "has", "FINISHED_ERROR", "blocks of a failed request are not stored"),
        ("metrics.cache_hit_source.CacheHitSource", "has", "DISK, HOST", "where a hit comes from"),
        ("kv_cache_interface.AttentionSpec", "has", "block_size, unpadded_page_size_bytes", "bytes of a page"),
        ("kv_cache_interface.ChunkedLocalAttentionSpec", "has", "attention_chunk_size", "pages that a prefix needs"),
        ("kv_cache_interface.FullAttentionSpec", "has", "block_size", "likewise"),
        ("kv_cache_interface.MambaSpec", "has", "mamba_cache_mode, page_size_bytes, page_size_padded", "likewise"),
        ("kv_cache_interface.RSWASpec", "has", "block_size", "refused"),
        ("kv_cache_interface.SlidingWindowSpec", "has", "extra_retained_tokens, sliding_window", "pages that a prefix needs"),
        ("kv_cache_interface.UniformTypeKVCacheSpecs", "has", "kv_cache_specs", "layers of a group"),
        ("kv_cache_interface.KVCacheConfig.needs_kv_cache_zeroing", "name", "present", "reused blocks are zeroed before we are told"),
        ("kv_cache_interface.KVCacheConfig.prefix_cacheable_group_ids", "name", "present", "pools that a prefix is made of"),
    ),
    *_seams("hicache", "vLLM's connector API becomes stable", "",
        ("_custom_ops.swap_blocks_batch", "call", "src_ptrs, dst_ptrs, sizes, is_src_access_order_any=", "batched copies by the driver"),
        ("forward_context.ForwardContext", "has", "attn_metadata, cudagraph_runtime_mode", "whether attention layers call us in a step"),
        ("model_executor.layers.attention.MLAAttention", "name", "present", "layers that call us"),
    ),
    *_seams("native", _TIER_API, "",
        ("distributed.kv_transfer.get_kv_transfer_group", "name", "present", "the benchmark slows our loads down, to find races"),
        ("v1.kv_offload.cpu.spec.CPUOffloadingSpec", "has", "_uses_shared_region, get_worker", "the benchmark's stand-ins for vLLM's own offloading"),
        ("v1.kv_offload.base.OffloadingWorker", "has", "get_finished, submit_load, submit_store, wait", "likewise"),
        ("v1.kv_offload.base.CanonicalKVCaches", "name", "present", "likewise"),
        ("v1.kv_offload.base.TransferResult", "call", "job_id, success, transfer_size=, transfer_time=", "likewise"),
    ),
    *_seams("native", _TIER_API, "v1.kv_offload",
        ("base.Locality", "name", "present", "told in the tier's events"),
        ("base.LookupResult", "has", "HIT, MISS, RETRY", "answers of the tier"),
        ("base.Medium", "has", "STORAGE", "what the tier is"),
        ("base.OffloadKey", "name", "present", "vLLM's name for a page: hash, then the group in four bytes"),
        ("base.OffloadingEvent", "has", "keys, locality, medium, removed", "events of the tier"),
        ("base.OffloadingSpec", "has", "get_manager, get_worker", "annotation: config, kv_events_config are read"),
        ("base.ReqContext", "has", "get_offload_key_position", "where a chunk ends, for its cost"),
        ("base.RequestOffloadingContext", "name", "present", "answer of the tier to a new request"),
        ("base.get_offload_block_hash", "source", "bfd855496e6e", "key of a page"),
        ("base.get_offload_group_idx", "source", "ad102e5acc79", "pool of a page"),
        ("base.make_offload_key", "source", "dc225f6f0552", "the reverse"),
        ("base.ScheduleEndContext", "has", "new_req_ids, preempted_req_ids", "a step of vLLM's tiers in our store"),
        ("config.OffloadingCacheConfig", "has", "blocks_per_chunk, tokens_per_hash", "told to vLLM's tiers in our store"),
        ("config.OffloadingModelConfig", "has", "dtype, name", "likewise: the namespace"),
        ("tiering.factory.SecondaryTierFactory.create_secondary_tier", "call", "cls, tier_config, primary_kv_view, offloading_spec", "makes vLLM's tiers for our store"),
        ("config.OffloadingConfig", "has", "cache, canonical_layout, groups, kv_cache_layout, model, parallel, replicated_layout", "makes the tier's namespace"),
        ("config.OffloadingParallelConfig", "has", "data_parallel_index, dcp_size, is_parallelism_agnostic, pcp_size, pp_size, tp_size", "likewise"),
        ("tiering.base.JobResult", "has", "job_id, success, successful_keys, transfer_bytes, transfer_time", "what became of a job of the tier"),
        ("tiering.base.SecondaryTierManager", "class", "ABC", "base of SegmentsTier"),
        ("tiering.base.SecondaryTierManager.__init__", "call", "self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=", "called by SegmentsTier"),
        ("tiering.base.TransferJob", "has", "chunk_ids, job_id, keys", "a job of the tier"),
        ("tiering.backpressure.BackpressureDetector", "name", "present", "handed on to vLLM's base class"),
        ("cpu.policies.base.CachePolicy", "has", "clear, evict, get, insert, mark_evictable, on_request_finished, on_store_miss, remove, touch", "base of our policies in vLLM's host pool; called where vLLM's are in ours"),
        ("cpu.policies.base.ChunkStatus", "has", "is_ready, ref_cnt", "busy chunks are not evicted"),
        ("cpu.policies.base.order_request_keys", "call", "key_groups, req_context", "head-to-tail order of a request's chunks"),
        ("cpu.policies.factory.CachePolicyFactory.get_cache_policy_cls", "call", "cls, name, module_path=", "finds vLLM's policies by name"),
    ),
    *_seams("hicache", "vLLM fingerprints what KV depends on (#49261)", "",
        ("config.CacheConfig", "has", "cache_dtype, prefix_caching_hash_algo", "part of the namespace"),
        ("config.LoadConfig", "has", "load_format, model_loader_extra_config", "likewise"),
    ),
    *_seams("testing", _GPU_FREE, "",
        ("LLM", "name", "present", "an engine in this process"),
        ("SamplingParams", "name", "present", "requests of the harness"),
        ("distributed.cleanup_dist_env_and_memory", "call", "shutdown_ray=", "between two engines"),
        ("model_executor.models.registry._run_in_subprocess", "call", "fn", "models are inspected in this process"),
        ("platforms.cpu.CpuPlatform", "has", "check_and_update_config, get_attn_backend_cls", "patched: scheduling, backend, graphs"),
        ("triton_utils.importing", "name", "present", "whether vLLM sees the interpreter"),
        ("v1.attention.backends.triton_attn.TritonAttentionBackend", "name", "present", "interpreted in place of the CPU's own"),
        ("v1.attention.selector._cached_get_attn_backend", "name", "present", "its cache is cleared with the patches"),
        ("v1.engine.core_client.InprocClient", "has", "engine_core, shutdown", "reaches the runner of an engine"),
        ("v1.engine.core.EngineCore", "has", "model_executor", "likewise"),
        ("v1.worker.gpu.model_runner.GPUModelRunner.capture_model", "call", "self, profile_only=", "the worker of a CPU does not call it"),
        ("v1.worker.cpu.shm", "module", "present", "replaces parts of torch: imported before our patches"),
        ("v1.worker.workspace.init_workspace_manager", "call", "device, num_ubatches=, num_lanes=, alloc_context=", "a capture locks the workspace"),
        ("v1.worker.workspace.reset_workspace_manager", "call", "no parameter", "likewise"),
    ),
)
# fmt: on
