"""Test harness for hooks of vllm-graft: real engines, kernels and graphs on a machine without GPU.

Nothing heavy is imported until a name is used. A ``conftest.py`` calls :func:`install` before
anything imports Triton or vLLM; tests then build engines with :func:`cpu_engine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graft.testing.compiling import KernelCase, compile_cases
    from vllm_graft.testing.contracts.cache_contracts import (
        EvictionPolicyContract,
        StorageBackendContract,
    )
    from vllm_graft.testing.contracts.tree_contracts import DrafterContract, TreePolicyContract
    from vllm_graft.testing.cuda.cuda_graphs import CaptureError, recording
    from vllm_graft.testing.cuda.simulated_streams import simulated
    from vllm_graft.testing.engine import cpu_engine, greedy, model_runner, running, spec_metrics
    from vllm_graft.testing.interpreter.install import install
    from vllm_graft.testing.models.block_drafts import (
        write_block_target,
        write_dflash,
        write_dflash2,
        write_dspark,
        write_lilicorr,
        write_xpress,
    )
    from vllm_graft.testing.models.llama import TinyShape, write_eagle, write_eagle3, write_llama
    from vllm_graft.testing.models.mtp_targets import write_glm4_moe, write_mimo

_HOME = {
    "CaptureError": "cuda.cuda_graphs",
    "EvictionPolicyContract": "contracts.cache_contracts",
    "KernelCase": "compiling",
    "DrafterContract": "contracts.tree_contracts",
    "StorageBackendContract": "contracts.cache_contracts",
    "TinyShape": "models.llama",
    "TreePolicyContract": "contracts.tree_contracts",
    "compile_cases": "compiling",
    "cpu_engine": "engine",
    "greedy": "engine",
    "install": "interpreter.install",
    "model_runner": "engine",
    "recording": "cuda.cuda_graphs",
    "running": "engine",
    "simulated": "cuda.simulated_streams",
    "spec_metrics": "engine",
    "write_block_target": "models.block_drafts",
    "write_dflash": "models.block_drafts",
    "write_dflash2": "models.block_drafts",
    "write_dspark": "models.block_drafts",
    "write_lilicorr": "models.block_drafts",
    "write_xpress": "models.block_drafts",
    "write_eagle": "models.llama",
    "write_eagle3": "models.llama",
    "write_llama": "models.llama",
    "write_glm4_moe": "models.mtp_targets",
    "write_mimo": "models.mtp_targets",
}

__all__ = [
    "CaptureError",
    "DrafterContract",
    "EvictionPolicyContract",
    "KernelCase",
    "StorageBackendContract",
    "TinyShape",
    "TreePolicyContract",
    "compile_cases",
    "cpu_engine",
    "greedy",
    "install",
    "model_runner",
    "recording",
    "running",
    "simulated",
    "spec_metrics",
    "write_block_target",
    "write_dflash",
    "write_dflash2",
    "write_dspark",
    "write_eagle",
    "write_eagle3",
    "write_glm4_moe",
    "write_lilicorr",
    "write_llama",
    "write_mimo",
    "write_xpress",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
