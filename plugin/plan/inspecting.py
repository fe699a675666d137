"""Where the classes of models are inspected, which vLLM does in a child process per class."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def inspecting() -> AbstractContextManager[Any]:
    """Let this process inspect classes, which then may no longer fork.

    A child process per class takes many seconds, and would not know of a GPU that is pretended.
    """
    from vllm.model_executor.models import registry

    return mock.patch.object(registry, "_run_in_subprocess", _here)


def _here(function: Callable[[], Any]) -> Any:
    return function()
