"""Tree drafting, CUDA graphs and a host KV cache for unmodified vLLM, as a pip plugin. Importing
this package imports neither torch nor vLLM."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vllm_graft.base.markers import hookimpl, hookspec
from vllm_graft.base.version import __version__

if TYPE_CHECKING:
    from vllm_graft.base.errors import GraftError
    from vllm_graft.config import GraftConfig
    from vllm_graft.extension import WorkerExtension
    from vllm_graft.spec_decode.config.tree_config import TreeConfig

__all__ = [
    "GraftConfig",
    "GraftError",
    "TreeConfig",
    "WorkerExtension",
    "__version__",
    "hookimpl",
    "hookspec",
    "register",
]

_LAZY = {
    "TreeConfig": "vllm_graft.spec_decode.config.tree_config",
    "GraftConfig": "vllm_graft.config",
    "GraftError": "vllm_graft.base.errors",
    "WorkerExtension": "vllm_graft.extension",
}


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it in each of its processes.
    Without a ``graft`` key nothing changes. It may run repeatedly, and touches no device."""
    from vllm_graft.activation import install

    install()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
