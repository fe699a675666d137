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
        ("model_executor.models.ModelRegistry", "name", "present", "the class of a model, to ask for its encoder protocol and its recurrent state"),
        ("model_executor.models.interfaces.supports_eagle3", "call", "model", "a target that gives an EAGLE-3 draft nothing is refused when it is loaded"),
        ("model_executor.models.registry._LazyRegisteredModel", "has", "inspect_model_cls", "one child process inspects all classes"),
        ("transformers_utils.repo_utils.get_hf_file_to_dict", "call", "file_name, model, revision=", "sizes of weights that are not on the disk"),
        ("config.ModelConfig.get_layers_start_end_indices", "call", "self, parallel_config", "layers of a pipeline rank"),
        ("config.ModelConfig.get_num_layers_by_block_type", "call", "self, parallel_config, block_type=", "layers with K/V, where we can't tell them by their names"),
        ("utils.torch_utils.kv_cache_dtype_str_to_dtype", "call", "kv_cache_dtype, model_config", "bytes of K/V"),
    ),
    *seams("plan", _PLAN, "",
        ("platforms.cuda", "module", "present", "base of a GPU that is pretended"),
        ("platforms._current_platform", "name", "present", "the platform of a process, set before anything asks"),
        ("config.vllm.HAS_TRITON", "name", "present", "the driver that vLLM looks for is missing where a GPU is pretended"),
        ("_custom_ops", "module", "present", "asked, when classes are imported, what compiled code can do"),
    ),
)
