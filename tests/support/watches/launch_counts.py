"""Counts how often a module's functions are called."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest


def count_launches(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str
) -> dict[str, int]:
    """Let functions of a module count their calls, by name, until the test ends."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str, stock: Callable[..., None]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            counts[name] += 1
            stock(*args, **kwargs)

        return launch

    for name in names:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts
