"""Stand-ins for vLLM's configurations, with the fields that the inputs of K/V are read from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def model_at(path: Path) -> Any:
    """Make a stand-in for a ModelConfig, with the fields that are read."""
    hf_config = {"hidden_size": 64, "rope_scaling": None, "_name_or_path": str(path)}
    return SimpleNamespace(
        model=str(path),
        revision=None,
        hf_config=SimpleNamespace(to_dict=lambda: dict(hf_config)),
        hf_values=hf_config,
        dtype=torch.bfloat16,
        quantization=None,
        quantization_config=None,
        model_impl="auto",
        trust_remote_code=True,
        disable_sliding_window=False,
        multimodal_config=SimpleNamespace(mm_processor_kwargs=None, media_io_kwargs={}),
        max_model_len=4096,
        seed=0,
    )


def vllm_config_at(path: Path) -> Any:
    """Make a stand-in for the VllmConfig of an engine that serves the model at a path."""
    return SimpleNamespace(
        model_config=model_at(path),
        speculative_config=None,
        weight_transfer_config=None,
        lora_config=None,
        attention_config=SimpleNamespace(backend=None),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            prefix_caching_hash_algo="sha256",
            block_size=16,
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            enable_expert_parallel=False,
            data_parallel_index=0,
        ),
    )


def captured_config(sizes: list[int]) -> Any:
    """Make a stand-in for the VllmConfig that a manager of graphs of these sizes reads."""
    return SimpleNamespace(
        # Our hook on vLLM's manager reads this; an engine of this process leaves the hook.
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_seqs=6),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=None,
    )
