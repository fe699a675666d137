"""Test harness for hooks of vllm-graft: real engines, kernels and graphs on a machine without GPU.

Nothing heavy is imported until a name is used. Start with :func:`install_interpreter`, then
build engines with :func:`cpu_engine`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_graft.testing.engine import cpu_engine, spec_metrics
    from vllm_graft.testing.interpreter import install

_HOME = {
    "cpu_engine": "engine",
    "install": "interpreter",
    "spec_metrics": "engine",
}

__all__ = ["cpu_engine", "install", "spec_metrics"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
