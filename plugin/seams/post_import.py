"""Run something right after a module's first import, without importing it.

``register()`` runs in processes that never touch the modules we hook (the API server, the model
inspection subprocess). Importing them there would cost seconds and memory; so the hook waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds nothing itself; adds the callback to what the other finders find."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callback = self.callbacks.get(fullname)
        if callback is None:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _call_after_exec(spec, callback)
                return spec
        return None


_finder = _Finder()


def after_import(module: str, callback: Callback) -> None:
    """Call ``callback(module)`` after ``module`` is executed: now, if it already was.

    The same module again replaces its callback. Survives a fork; a spawned process starts bare.
    """
    _finder.callbacks[module] = callback
    if module in sys.modules:
        callback(sys.modules[module])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _call_after_exec(spec: ModuleSpec, callback: Callback) -> None:
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        callback(module)

    # On the instance, which serves this one spec: the loader keeps its type (inspect, pkgutil).
    loader.exec_module = exec_module  # type: ignore[method-assign]
