"""Test harness for hooks of vllm-graft: real engines and kernels on a machine without GPU. Nothing
heavy is imported until a name is used. A ``conftest.py`` calls :func:`install` before anything
imports Triton or vLLM; tests then build engines with :func:`cpu_engine`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graft.testing.contracts.cache_contracts import (
        EvictionPolicyContract as EvictionPolicyContract,
    )
    from vllm_graft.testing.contracts.cache_contracts import (
        StorageBackendContract as StorageBackendContract,
    )
    from vllm_graft.testing.contracts.tree_contracts import DrafterContract as DrafterContract
    from vllm_graft.testing.contracts.tree_contracts import TreePolicyContract as TreePolicyContract
    from vllm_graft.testing.engine import cpu_engine as cpu_engine
    from vllm_graft.testing.engine import greedy as greedy
    from vllm_graft.testing.engine import model_runner as model_runner
    from vllm_graft.testing.engine import running as running
    from vllm_graft.testing.engine import spec_metrics as spec_metrics
    from vllm_graft.testing.interpreter.install import install as install
    from vllm_graft.testing.models.llama import TinyShape as TinyShape
    from vllm_graft.testing.models.llama import write_eagle as write_eagle
    from vllm_graft.testing.models.llama import write_eagle3 as write_eagle3
    from vllm_graft.testing.models.llama import write_llama as write_llama

_NAMES = {
    "contracts.cache_contracts": "EvictionPolicyContract StorageBackendContract",
    "contracts.tree_contracts": "DrafterContract TreePolicyContract",
    "engine": "cpu_engine greedy model_runner running spec_metrics",
    "interpreter.install": "install",
    "models.llama": "TinyShape write_eagle write_eagle3 write_llama",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
