"""Test harness for hooks of vllm-graft: real engines, kernels and graphs on a machine without GPU.

Nothing heavy is imported until a name is used. A ``conftest.py`` calls :func:`install` before
anything imports Triton or vLLM; tests then build engines with :func:`cpu_engine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graft.testing.cache_contracts import (
        EvictionPolicyContract,
        StorageBackendContract,
    )
    from vllm_graft.testing.contracts import ProposerContract, TreePolicyContract
    from vllm_graft.testing.cuda_graphs import CaptureError, recording
    from vllm_graft.testing.engine import (
        cpu_engine,
        greedy,
        model_runner,
        running,
        spec_metrics,
    )
    from vllm_graft.testing.interpreter import install
    from vllm_graft.testing.kernels import KernelCase, compile_cases
    from vllm_graft.testing.models import TinyShape, write_eagle, write_eagle3, write_llama
    from vllm_graft.testing.streams import simulated

_HOME = {
    "CaptureError": "cuda_graphs",
    "EvictionPolicyContract": "cache_contracts",
    "KernelCase": "kernels",
    "ProposerContract": "contracts",
    "StorageBackendContract": "cache_contracts",
    "TinyShape": "models",
    "TreePolicyContract": "contracts",
    "compile_cases": "kernels",
    "cpu_engine": "engine",
    "greedy": "engine",
    "install": "interpreter",
    "model_runner": "engine",
    "recording": "cuda_graphs",
    "running": "engine",
    "simulated": "streams",
    "spec_metrics": "engine",
    "write_eagle": "models",
    "write_eagle3": "models",
    "write_llama": "models",
}

__all__ = [
    "CaptureError",
    "EvictionPolicyContract",
    "KernelCase",
    "ProposerContract",
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
    "write_eagle",
    "write_eagle3",
    "write_llama",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
