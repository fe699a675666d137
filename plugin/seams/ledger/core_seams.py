"""What every part relies on: configuration, platform, plugins, workers, and the way to /metrics."""

from vllm_graft.seams.ledger.entry import seams

_CONFIG_API = "a configuration hook for general plugins"
_STATE_API = "a ModelState hook for plugins"

# Columns: path, kind, what is expected, why.
# fmt: off
CORE = (
    *seams("core", _CONFIG_API, "",
        ("__version__", "name", "present", "told in errors and reports"),
        ("platforms.current_platform", "name", "present", "its class is the one to hook"),
        ("platforms.interface.Platform", "has", "device_type, is_cuda, is_cuda_alike, get_device_capability(cls, device_id=), get_device_total_memory(cls, device_id=), check_and_update_config(cls, vllm_config, no other), apply_config_platform_defaults(cls, vllm_config, no other)", "told by the doctor, hooked; what a device can't do is refused; get_device_capability: likewise; where NVML is there it does not initialise CUDA; get_device_total_memory: a preset's nodes on recurrent layers, and the room that is planned for K/V; check_and_update_config: wrapped on the current platform's class to read our key; apply_config_platform_defaults: wrapped likewise, to refuse misspelt keys and to fill in the numbers of nodes of tree: auto"),
        ("platforms.interface.DeviceCapability", "has", "as_version_str, major, minor", "likewise"),
        ("envs", "has", "VLLM_BATCH_INVARIANT, compile_factors()", "attention in two passes is refused beside it; compile_factors: variables that kernels are chosen by, to which a proof is bound"),
        ("plugins.load_general_plugins", "call", "no parameter", "calls register() in every process"),
    ),
    *seams("core", _CONFIG_API, "config",
        ("VllmConfig", "has", "additional_config, attention_config, cache_config, compilation_config, kv_transfer_config, load_config, lora_config, model_config, num_lookahead_tokens, parallel_config, scheduler_config, speculative_config, use_v2_model_runner, watermark_config, weight_transfer_config", "our key, and what is refused beside it; the KV's namespace; slots behind a text for a draft block, whose rows are at most a tree's"),
        ("AttentionConfig", "has", "backend, flash_attn_version", "attention in two passes is refused beside others; the KV's namespace"),
        ("CacheConfig", "has", "block_size, cache_dtype, kv_cache_dtype_skip_layers, mamba_cache_dtype, mamba_ssm_cache_dtype, prefix_caching_hash_algo, user_specified_block_size", "tree attention is timed with it; the KV's namespace; bytes of recurrent states; least bytes of a page"),
        ("KVTransferConfig", "has", "engine_id, kv_connector, kv_connector_extra_config, kv_connector_module_path, kv_load_failure_policy", "our connectors' keys; the nonce that names the host's memory, put into a copy"),
        ("ModelConfig", "has", "architectures, disable_sliding_window, dtype, enable_cumem_allocator, enable_sleep_mode, enable_trace_replay, enforce_eager, get_head_size, get_hidden_size, get_num_attention_heads, get_num_kv_heads, get_total_num_hidden_layers, get_total_num_kv_heads, get_vocab_size, hf_config, hf_text_config, is_attention_free, is_diffusion, is_encoder_decoder, is_hybrid, is_mm_prefix_lm, is_moe, logits_processors, max_model_len, model, multimodal_config, quantization, return_sampling_mask, revision, runner_type, seed, tokenizer, tokenizer_revision, use_mla, uses_alibi", "targets and features that are refused; the KV's namespace; least bytes of a page; whose rows have experts of their own"),
        ("MultiModalConfig", "has", "language_model_only, media_io_kwargs, mm_encoder_attn_backend, mm_encoder_attn_dtype, mm_encoder_fp8_scale_path, mm_encoder_tp_mode, mm_processor_kwargs, video_pruning_rate", "what is refused; how images become embeddings, an input of K/V"),
        ("ParallelConfig", "has", "cp_kv_cache_interleave_size, data_parallel_backend, data_parallel_index, data_parallel_size, data_parallel_size_local, decode_context_parallel_size, distributed_executor_backend, enable_batch_sharded_sampling, enable_expert_parallel, pipeline_parallel_size, prefill_context_parallel_size, tensor_parallel_size, use_ubatching, worker_extension_cls", "what is refused; our extension is set; the KV's namespace"),
        ("SchedulerConfig", "has", "async_scheduling, disable_chunked_mm_input, enable_chunked_prefill, long_prefill_token_threshold, max_num_batched_tokens, max_num_scheduled_tokens, max_num_seqs, scheduler_cls", "the draft's levels and a request's full tree have to fit; tree: auto is refused beside another scheduler"),
        ("SpeculativeConfig", "has", "attention_backend, draft_model_config, draft_sample_method, enable_adaptive_verification, max_num_new_slots_for_drafting, method, num_speculative_tokens, num_speculative_tokens_per_batch_size, parallel_drafting, prompt_lookup_max, prompt_lookup_min, rejection_sample_method, target_model_config, target_parallel_config, use_local_argmax_reduction", "nodes of a tree; what is refused; the KV's namespace"),
        ("CompilationConfig", "has", "cudagraph_capture_sizes, cudagraph_mm_encoder, cudagraph_mode, encoder_cudagraph_max_frames_per_batch, encoder_cudagraph_token_budgets, max_cudagraph_capture_size, static_forward_context", "graphs of mixed batches are refused, encoder graphs turned on; rows of the largest; finds the layers' K/V"),
        ("CUDAGraphMode", "has", "FULL, FULL_DECODE_ONLY, NONE, decode_mode", "which graphs the draft captures"),
    ),
    *seams("core", "workers can report to plugins", "v1.worker.worker_base.WorkerWrapperBase",
        ("init_worker", "order", "load_general_plugins(), worker_extension_cls", "runs register() before it resolves the worker extension"),
    ),
    *seams("core", "workers can report to plugins", "v1.worker",
        ("worker_base.WorkerWrapperBase", "has", "vllm_config, worker, initialize_from_config(self, kv_cache_configs, no other)", "configuration and worker that are checked; initialize_from_config: wrapped to check, after loading, that what was asked for runs"),
        ("gpu_worker.Worker", "has", "model_runner", "likewise"),
    ),
    *seams("core", "vLLM tells plugins about its ranks", "distributed",
        ("", "has", "get_dp_group(), get_tp_group(), model_parallel_is_initialized()", "get_dp_group: data-parallel ranks measure the same costs of steps; get_tp_group: tensor-parallel ranks agree on graphs and kernels, and compare their trees; model_parallel_is_initialized: a kernel that is timed outside of an engine has no ranks"),
        ("parallel_state.GroupCoordinator", "has", "all_gather, cpu_group, rank_in_group, world_size", "likewise"),
    ),
    *seams("core", _STATE_API, "v1.worker.gpu",
        ("model_states.resolve_model_state_cls", "order", '(vllm_config, model), "get_model_state_cls", return model.get_model_state_cls()', "asks model.get_model_state_cls first"),
        ("model_states.interface.ModelState", "has", "device, vllm_config", "our mixins stack over it"),
        ("model_runner.GPUModelRunner", "has", "attn_groups, block_tables, cudagraph_manager, device, draft_tokens_handler, input_buffers, is_first_pp_rank, kv_cache_config, lora_state, model, model_state, prompt_logprobs_worker, speculator", "the proof that our proposer runs; replays that are timed; what copies drafts for the scheduler; adapters of requests"),
        ("model_runner.GPUModelRunner.execute_model", "order", "self.update_requests(scheduler_output), self.gather_batch_req_state(, self.prepare_attn(input_batch), self.model_state.preprocess_state(, self.lora_state.make_lora_inputs(, self._set_active_loras(*lora_inputs), self.model_state.prepare_attn(, self.model_state.prepare_inputs(", "slots are mapped before positions become depths, loads within a step begin behind what they come after; adapters are mapped to the rows of a step that has begun"),
    ),
    *seams("core", "vLLM hands requests to plugins", "v1",
        ("request.Request", "has", "all_token_ids, block_hashes, cache_salt, is_finished(self), is_prefill_chunk, lora_request, mm_features, num_computed_tokens, num_output_placeholders, num_output_tokens, num_tokens, num_tokens_with_spec, output_token_ids, prompt_token_ids, request_id, resumable, sampling_params, skip_reading_prefix_cache, structured_output_request, use_structured_output", "keys and progress of a request; tree: auto reads its temperature and context; rows that it needs next; whose tree a grammar walks; whose text it is in a memory; whether its text copies itself; what is recorded of it"),
    ),
)


_STATS = "vLLM's SchedulerStats has a field for plugins"
_LOG = "vLLM's metrics of drafts know trees"

# Columns: path, kind, what is expected, why.
# fmt: off
ENGINE = (
    *seams("engine", "vLLM calls plugins once an engine has its scheduler", "v1.engine.core",
        ("EngineCore._initialize_effective_attention_block_size", "call", "self, no other", "wrapped: the first that a spawned process calls when there is a scheduler, and the workers have captured their graphs"),
    ),
)

METRICS = (
    *seams("metrics", _STATS, "v1.worker",
        ("gpu.async_utils.AsyncOutput", "has", "get_output, model_runner_output", "a step's result carries the worker's report"),
        ("gpu.async_utils.AsyncPoolingOutput", "has", "get_output, model_runner_output", "likewise, of a pooling model"),
        ("gpu_model_runner.AsyncGPUModelRunnerOutput", "has", "_model_runner_output, get_output", "likewise, of Model Runner V1"),
        ("gpu_model_runner.AsyncGPUPoolingModelRunnerOutput", "has", "_model_runner_output, get_output", "likewise"),
    ),
    *seams("metrics", _STATS, "v1.engine",
        ("core.EngineCore", "has", "collective_rpc, log_stats, model_executor, scheduler, vllm_config", "whether anybody reads statistics; asks the workers which parts run; the harness finds an engine's runner"),
        ("core.EngineCoreProc", "has", "output_queue", "the parts' states go to the frontend before the first step"),
        ("EngineCoreOutputs", "has", "scheduler_stats", "a step's statistics, which our message goes with"),
    ),
    *seams("metrics", _STATS, "v1.metrics",
        ("stats.SchedulerStats", "has", "kv_connector_stats, num_running_reqs, num_waiting_reqs, spec_decoding_stats", "our message is an entry of kv_connector_stats; whether the engine is idle"),
        ("loggers.StatLoggerManager", "has", "stat_loggers, __init__(self, vllm_config, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, aggregate_engine_logging=, client_count=), record(self, scheduler_stats, iteration_stats, mm_cache_stats=, engine_idx=)", "our series are made like those of vLLM's loggers; __init__: wrapped: our series are made after vLLM's; record: wrapped: our message is taken out before the loggers look"),
        ("loggers.PrometheusStatLogger", "has", "_counter_cls, _gauge_cls, _histogram_cls, per_engine_labelvalues, spec_decoding_prom", "classes and labels of our series; has vLLM's counters by position"),
        ("loggers.PrometheusStatLogger.__init__", "order", 'unregister_vllm_metrics(), labelnames = ["model_name", "engine"]', "our series come after it has dropped the older ones"),
        ("loggers.PerEngineStatLoggerAdapter", "has", "per_engine_stat_loggers", "finds the log lines of each engine"),
    ),
    *seams("metrics", _LOG, "v1",
        ("metrics.loggers.LoggingStatLogger", "has", "spec_decoding_logging", "its line on drafts is replaced for trees"),
        ("spec_decode.metrics.SpecDecodingLogging", "has", "accepted_tokens_per_pos_lists, last_log_time, num_accepted_tokens, num_draft_tokens, num_drafts, reset, log(self, log_fn=, no other)", "base of that line; log: overridden"),
        ("spec_decode.metrics.logger", "name", "present", "where the line goes"),
        ("spec_decode.metrics.SpecDecodingProm", "has", "counter_spec_decode_num_accepted_tokens_per_pos, observe", "counters by position: those deeper than trees are left out until they count"),
        ("spec_decode.metrics.SpecDecodingStats", "has", "num_accepted_tokens, num_accepted_tokens_per_pos, num_draft_tokens, num_drafts", "trees, nodes and depths of a step"),
        ("spec_decode.metrics.SpecDecodingStats.observe_draft", "order", "(self, num_draft_tokens, num_accepted_tokens), in range(num_accepted_tokens), self.num_accepted_tokens_per_pos[i] += 1", "counts accepted drafts by their place in the emitted row, which is a node's depth"),
        ("core.sched.scheduler.Scheduler.make_spec_decoding_stats", "order", "num_draft_tokens -= num_invalid_spec_tokens.get(", "drafts that a grammar refused do not count"),
    ),
)
