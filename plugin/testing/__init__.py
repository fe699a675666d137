"""Test harness for hooks of vllm-graft: real engines and kernels on a machine without GPU. Nothing
heavy is imported until a name is used. A ``conftest.py`` calls :func:`install` before anything
imports Triton or vLLM; tests then build engines with :func:`cpu_engine`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graft.testing.contracts.cache_contracts import (
        EvictionPolicyContract,
        StorageBackendContract,
    )
    from vllm_graft.testing.contracts.tree_contracts import DrafterContract, TreePolicyContract
    from vllm_graft.testing.engine import cpu_engine, greedy, model_runner, running, spec_metrics
    from vllm_graft.testing.interpreter.install import install
    from vllm_graft.testing.models.llama import TinyShape, write_eagle, write_eagle3, write_llama

_NAMES = {
    "contracts.cache_contracts": "EvictionPolicyContract StorageBackendContract",
    "contracts.tree_contracts": "DrafterContract TreePolicyContract",
    "engine": "cpu_engine greedy model_runner running spec_metrics",
    "interpreter.install": "install",
    "models.llama": "TinyShape write_eagle write_eagle3 write_llama",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [
    "DrafterContract",
    "EvictionPolicyContract",
    "StorageBackendContract",
    "TinyShape",
    "TreePolicyContract",
    "cpu_engine",
    "greedy",
    "install",
    "model_runner",
    "running",
    "spec_metrics",
    "write_eagle",
    "write_eagle3",
    "write_llama",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
