"""Run something right after a module's first import, without importing it. ``register()`` also runs
in processes that never need the modules we hook, as the API server."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Finds nothing itself; adds the callback to what the other finders find."""

    def __init__(self) -> None:
        self.callbacks: dict[str, dict[str, Callback]] = {}
        """By module, then by the callback's own name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        callbacks = self.callbacks.get(fullname)
        if callbacks is None:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                _call_after_exec(spec, callbacks)
                return spec
        return None


_finder = _Finder()


def after_import(module: str, callback: Callback) -> None:
    """Call ``callback(module)`` after ``module`` is executed: now, if it already was. A callback of
    the same module and name is replaced. It survives a fork; a spawned process starts bare."""
    _finder.callbacks.setdefault(module, {})[_name_of(callback)] = callback
    if module in sys.modules:
        callback(sys.modules[module])
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _name_of(callback: Callback) -> str:
    if isinstance(callback, functools.partial):
        return f"{_name_of(callback.func)}{callback.args}"
    return f"{callback.__module__}.{callback.__qualname__}"


def _call_after_exec(spec: ModuleSpec, callbacks: Mapping[str, Callback]) -> None:
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        for callback in callbacks.values():
            callback(module)

    # On the instance, which serves this one spec: the loader keeps its type (inspect, pkgutil).
    loader.exec_module = exec_module  # type: ignore[method-assign]
