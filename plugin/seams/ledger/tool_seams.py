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
        ("model_executor.models.ModelRegistry", "name", "present", "the class of a model, to ask for its encoder protocol"),
        ("model_executor.models.interfaces.supports_eagle3", "call", "model", "a target that gives an EAGLE-3 draft nothing is refused when it is loaded"),
    ),
    *seams("plan", _PLAN, "",
        ("platforms.cuda", "module", "present", "base of a GPU that is pretended"),
        ("platforms._current_platform", "name", "present", "the platform of a process, set before anything asks"),
        ("config.vllm.HAS_TRITON", "name", "present", "the driver that vLLM looks for is missing where a GPU is pretended"),
        ("triton_utils.triton", "name", "present", "vLLM's stand-in for Triton gives configurations of kernels there"),
        ("_custom_ops", "module", "present", "asked, when classes are imported, what compiled code can do"),
    ),
    *seams("plan", "vLLM says what a model takes, without a device", "",
        ("model_executor.model_loader.utils.initialize_model", "call", "vllm_config, model_config=", "builds a model's layers, which are asked for their sizes"),
        ("model_executor.layers.attention_layer_base.AttentionLayerBase.get_kv_cache_spec", "call", "self, vllm_config", "K/V of a layer"),
        ("model_executor.layers.sparse_attn_indexer.has_deep_gemm", "name", "present", "asked when a layer is built"),
        ("model_executor.layers.rotary_embedding._ROPE_DICT", "name", "present", "a cache that must keep nothing of what is built"),
        ("platforms.interface.Platform.update_block_size_for_backend", "call", "cls, vllm_config", "size of blocks, once the target is built"),
        ("distributed.parallel_state._TP", "name", "present", "groups of ranks are stood in for"),
        ("config.VllmConfig._get_quantization_config", "call", "model_config, load_config", "quantization of a standalone draft"),
        ("config.SpeculativeConfig.hf_config_override", "call", "hf_config", "which checkpoints have an MTP module; a preset's lines say it, too"),
        ("v1.core.kv_cache_planning", "has", {"0.33": "get_kv_cache_groups(vllm_config, kv_cache_spec), get_kv_cache_config_from_groups(vllm_config, kv_cache_groups, available_memory)"}, "get_kv_cache_groups, get_kv_cache_config_from_groups: tokens that a GPU has room for; 0.32 has it in kv_cache_utils"),
        ("v1.core.kv_cache_utils.get_kv_cache_capacity", "call", "vllm_config, kv_cache_config", "likewise"),
        ("v1.kv_cache_interface.CrossAttentionSpec", "name", "present", "K/V of a text's encoder"),
        ("utils.torch_utils.set_default_torch_dtype", "call", "dtype", "a model is built in its own dtype"),
    ),
)

TOOL = (
    *seams("bench", "vLLM benchmarks a vision tower alone", "",
        ("distributed", "has", "destroy_distributed_environment(), destroy_model_parallel()", "destroy_distributed_environment, destroy_model_parallel: at the end"),
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
        ("distributed", "has", "cleanup_dist_env_and_memory(), init_distributed_environment(world_size=, rank=, distributed_init_method=, local_rank=, backend=, timeout=), initialize_model_parallel", "cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel: between two engines"),
        ("config.set_current_vllm_config", "call", "vllm_config", "a tower without an engine"),
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
        ("v1.worker.gpu.model_runner.GPUModelRunner.capture_model", "call", "self", "the worker of a CPU does not call it"),
        ("v1.worker.cpu.shm", "module", "present", "replaces parts of torch: imported before our patches"),
        ("v1.worker.workspace", "has", "init_workspace_manager(device), reset_workspace_manager()", "init_workspace_manager, reset_workspace_manager: a capture locks the workspace"),
    ),
)
