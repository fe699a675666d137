"""What ``vllm-graft plan``, the harness and the benchmarks rely on. No part needs these rows."""

from vllm_graft.seams.ledger.entry import seams

_PLAN = "vLLM says what a server would run, without one"
_GPU_FREE = "vLLM tests Model Runner V2 on a CPU"

# Columns: path, kind, what is expected, why.
# fmt: off
PLAN = (
    *seams("plan", _PLAN, "",
        ("entrypoints.cli.serve.ServeSubcommand", "has", "name, subparser_init, validate", "reads the flags of `vllm serve`"),
        ("utils.argparse_utils.FlexibleArgumentParser", "name", "present", "likewise"),
        ("engine.arg_utils.AsyncEngineArgs", "has", "create_engine_config, from_cli_args", "builds the configuration as the frontend does"),
        ("usage.usage_lib.UsageContext", "has", "OPENAI_API_SERVER", "defaults of a server"),
        ("model_executor.models.ModelRegistry", "name", "present", "the class of a model, to ask for its encoder protocol and its recurrent state"),
        ("model_executor.models.interfaces.supports_eagle3", "call", "model", "a target that gives an EAGLE-3 draft nothing is refused when it is loaded"),
        ("transformers_utils.repo_utils.get_hf_file_to_dict", "call", "file_name, model, revision=", "sizes of weights that are not on the disk"),
        ("config.ModelConfig.get_layers_start_end_indices", "call", "self, parallel_config", "layers of a pipeline rank"),
        ("config.ModelConfig.get_num_layers_by_block_type", "call", "self, parallel_config, block_type=", "layers with K/V, where we can't tell them by their names"),
        ("utils.torch_utils.kv_cache_dtype_str_to_dtype", "call", "kv_cache_dtype, model_config", "bytes of K/V"),
    ),
)

TOOL = (
    *seams("bench", "vLLM benchmarks a vision tower alone", "",
        ("distributed.destroy_distributed_environment", "call", "no parameter", "at the end"),
        ("distributed.destroy_model_parallel", "call", "no parameter", "likewise"),
        ("distributed.parallel_state.graph_capture", "call", "device", "what the engine puts around a capture"),
        ("model_executor.models.qwen2_5_vl.Qwen2_5_VLForConditionalGeneration", "has", "embed_multimodal, is_multimodal_pruning_enabled, multimodal_config, use_data_parallel, visual", "a tower to measure; the constructor is ours"),
        ("model_executor.models.qwen2_5_vl.Qwen2_5_VisionTransformer", "has", "attn_backend, out_hidden_size, spatial_merge_size", "likewise"),
        ("model_executor.models.qwen3_vl.Qwen3VLForConditionalGeneration", "has", "embed_multimodal, is_multimodal_pruning_enabled, multimodal_config, use_data_parallel, visual", "likewise"),
        ("model_executor.models.qwen3_vl.Qwen3_VisionTransformer", "has", "attn_backend, out_hidden_size, spatial_merge_size", "likewise"),
    ),
    *seams("testing", _GPU_FREE, "",
        ("LLM", "name", "present", "an engine in this process"),
        ("RequestOutput", "name", "present", "what an engine answers"),
        ("SamplingParams", "name", "present", "requests of the harness"),
        ("distributed.cleanup_dist_env_and_memory", "call", "shutdown_ray=", "between two engines"),
        ("config.set_current_vllm_config", "call", "vllm_config, check_compile=, prefix=", "a tower without an engine"),
        ("distributed.init_distributed_environment", "call", "world_size=, rank=, distributed_init_method=, local_rank=, backend=, timeout=", "likewise"),
        ("distributed.initialize_model_parallel", "name", "present", "likewise"),
        ("entrypoints.cli.main", "module", "present", "`vllm serve` in a process of its own"),
        ("lora.request.LoRARequest", "name", "present", "requests with an adapter"),
        ("model_executor.models.qwen2_5_vl", "name", "present", "likewise: windowed attention"),
        ("model_executor.models.qwen3_vl", "name", "present", "likewise: deepstack"),
        ("model_executor.models.registry._run_in_subprocess", "call", "fn", "models are inspected in this process"),
        ("platforms.cpu.CpuPlatform", "has", "check_and_update_config, get_attn_backend_cls", "patched: scheduling, backend, graphs"),
        ("triton_utils.importing", "name", "present", "whether vLLM sees the interpreter"),
        ("v1.attention.backends.triton_attn.TritonAttentionBackend", "name", "present", "interpreted in place of the CPU's own"),
        ("v1.attention.backends.mla.triton_mla.TritonMLABackend", "name", "present", "likewise, for targets with MLA"),
        ("v1.attention.backends.mla.triton_mla.TritonMLAImpl", "has", "do_kv_cache_update", "its operator for CUDA is replaced"),
        ("v1.attention.selector._cached_get_attn_backend", "name", "present", "its cache is cleared with the patches"),
        ("v1.engine.core_client.InprocClient", "has", "engine_core, shutdown", "reaches the runner of an engine"),
        ("v1.sample.ops.topk_topp_sampler.apply_top_k_top_p", "order", "if HAS_TRITON, apply_top_k_top_p_triton(, apply_top_k_top_p_pytorch(", "its flag is false in an engine on a CPU"),
        ("v1.worker.gpu.model_runner.GPUModelRunner.capture_model", "call", "self, profile_only=", "the worker of a CPU does not call it"),
        ("v1.worker.cpu.shm", "module", "present", "replaces parts of torch: imported before our patches"),
        ("v1.worker.workspace.init_workspace_manager", "call", "device, num_ubatches=, num_lanes=, alloc_context=", "a capture locks the workspace"),
        ("v1.worker.workspace.reset_workspace_manager", "call", "no parameter", "likewise"),
    ),
)
