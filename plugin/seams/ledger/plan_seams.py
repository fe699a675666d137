"""What ``vllm-graft plan`` relies on. No part needs these rows."""

from __future__ import annotations

from vllm_graft.seams.ledger.entry import Seam
from vllm_graft.seams.ledger.notation import seams

_PLAN = "vLLM says what a server would run, without one"

# Columns: path, kind, what is expected, why.
# fmt: off
PLAN: tuple[Seam, ...] = (
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
        ("model_executor.model_loader.utils.initialize_model", "call", "vllm_config, prefix=, model_class=, model_config=", "builds a model's layers, which are asked for their sizes"),
        ("model_executor.layers.attention_layer_base.AttentionLayerBase.get_kv_cache_spec", "call", "self, vllm_config", "K/V of a layer"),
        ("model_executor.layers.sparse_attn_indexer.has_deep_gemm", "name", "present", "asked when a layer is built"),
        ("model_executor.layers.rotary_embedding._ROPE_DICT", "name", "present", "a cache that must keep nothing of what is built"),
        ("platforms.interface.Platform.update_block_size_for_backend", "call", "cls, vllm_config", "size of blocks, once the target is built"),
        ("distributed.parallel_state._TP", "name", "present", "groups of ranks are stood in for"),
        ("config.VllmConfig._get_quantization_config", "call", "model_config, load_config", "quantization of a standalone draft"),
        ("config.SpeculativeConfig.hf_config_override", "call", {"0.32": "hf_config", "0.33": "hf_config, transformers_mtp_overrides="}, "which checkpoints have an MTP module; a preset's lines say it, too"),
        ("v1.core.kv_cache_planning.get_kv_cache_groups", "call", {"0.33": "vllm_config, kv_cache_spec"}, "tokens that a GPU has room for; 0.32 has it in kv_cache_utils"),
        ("v1.core.kv_cache_planning.get_kv_cache_config_from_groups", "call", {"0.33": "vllm_config, kv_cache_groups, available_memory"}, "likewise"),
        ("v1.core.kv_cache_utils.get_kv_cache_capacity", "call", "vllm_config, kv_cache_config", "likewise"),
        ("v1.kv_cache_interface.CrossAttentionSpec", "name", "present", "K/V of a text's encoder"),
    ),
)
