"""The ways in which we hook vLLM's classes and objects; each does nothing the second time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graft.base.errors import GraftError, NotActiveError
from vllm_graft.base.log import info_once
from vllm_graft.seams.compare import tested_text, vllm_version

if TYPE_CHECKING:
    import torch.nn as nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.model_states.interface import ModelState

MARK = "_vllm_graft"
"""Attribute of a function that stands in the place of one of vLLM's: names of what is around it."""


_Chooser = tuple[Callable[[type[Any], Any], type[Any]], Callable[[type[Any]], None]]

_CHOOSERS = "_vllm_graft_choosers"
"""Attribute of our ``__new__``: what chooses a class, each with who is told of it."""


def is_hooked(function: Any) -> bool:
    """Whether a function is one of ours."""
    return bool(getattr(function, MARK, ()))


def wrap(owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
    """Put ``around(original)``, known by module and name, in a function's place on its owner."""
    original = getattr(owner, name)
    key = f"{around.__module__}.{around.__qualname__}"
    there: tuple[str, ...] = getattr(original, MARK, ())
    if key in there:
        return
    ours = functools.wraps(original)(around(original))
    setattr(ours, MARK, (*there, key))
    setattr(owner, name, ours)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what is called in a function's place on its owner, with the original first."""

    def put(call: Callable[..., Any]) -> Callable[..., Any]:
        def then(original: Any) -> Callable[..., Any]:
            return lambda *args, **kwargs: call(original, *args, **kwargs)

        then.__module__, then.__qualname__ = call.__module__, call.__qualname__
        wrap(owner, name, then)
        return call

    return put


def after_scheduler(core: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate what is called, with the original first, when an engine core of vLLM's has its
    scheduler, and its workers have captured their graphs. Its ``__init__`` is too early: a spawned
    process has begun it before it loads plugins."""
    return around(core, "_initialize_effective_attention_block_size")


def build_instead(
    stock: type[Any] | None,
    choose: Callable[[type[Any], Any], type[Any]],
    built: Callable[[type[Any]], None],
) -> None:
    """Let a class that is asked to build itself build what is chosen, a subclass of it.

    The class object stays the same, so ``isinstance``, imports by name and subclassing stay right.
    `stock`: vLLM's class, whose first argument is its configuration; None where vLLM has none.
    `choose`: the class to build, from ``stock`` and the configuration; ``stock`` for itself. The
    first of several that chooses another class counts. `built`: told of every other class that is
    built."""
    if stock is None:
        return
    if "__new__" in vars(stock):
        # Two parts may stand over one class, each with configurations of its own.
        known: list[_Chooser] = getattr(stock.__new__, _CHOOSERS, [])
        if all(choose != other for other, _ in known):
            known.append((choose, built))
        return
    choosers: list[_Chooser] = [(choose, built)]

    # A class of vLLM's may extend another that is hooked, whose __new__ then gets no arguments.
    def __new__(cls: type[Any], vllm_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(cls, vllm_config, choosers) if cls is stock else cls
        return super(stock, chosen).__new__(chosen)

    setattr(__new__, _CHOOSERS, choosers)
    stock.__new__ = staticmethod(__new__)  # type: ignore[assignment]


def _chosen(stock: type[Any], vllm_config: Any, choosers: list[_Chooser]) -> type[Any]:
    for choose, built in choosers:
        if (chosen := choose(stock, vllm_config)) is not stock:
            built(chosen)
            return chosen
    return stock


def compose(target_model: nn.Module, vllm_config: VllmConfig, mixin: type[Any]) -> type[ModelState]:
    """Stack ``mixin``, whose hooks must call ``super()``, over the ModelState class that vLLM would
    use for ``target_model``; the last call is outermost. Model Runner V2 asks this model, which
    alone is changed, for its class first (``get_model_state_cls``); so this comes while the model
    is loaded. Raises `GraftError` if ``mixin`` is already part of the model's class."""
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    base = resolve_model_state_cls(vllm_config, target_model)
    if issubclass(base, mixin):
        raise GraftError(f"{mixin.__name__} is already part of {base.__name__}; compose it once")
    composed: type[ModelState] = type(f"{mixin.__name__}Over{base.__name__}", (mixin, base), {})
    target_model.get_model_state_cls = lambda: composed
    return composed


class BuiltClasses:
    """Classes of ours that were built in the place of vLLM's in this process. ``does`` says what
    they do, for the log: ``drafts``."""

    def __init__(self, does: str) -> None:
        self._does = does
        self._classes: set[type[Any]] = set()

    def add(self, built: type[Any]) -> None:
        self._classes.add(built)
        info_once(f"vllm-graft {self._does} with {built.__module__}.{built.__qualname__}")

    def __contains__(self, instance_type: object) -> bool:
        return instance_type in self._classes


def require_speculator(
    worker: Any, built: BuiltClasses, flag: str, asks_for: str, stock: str
) -> None:
    """Check that a worker with a model drafts with one of our classes, built for the class
    ``stock``. Raises `NotActiveError`, which says what drafts in our place."""
    runner = getattr(worker, "model_runner", None)
    speculator = getattr(runner, "speculator", None)
    if type(speculator) in built:
        return
    raise NotActiveError(
        f"{flag} asks for {asks_for}, but {type(runner).__module__}.{type(runner).__name__} of "
        f"vLLM {vllm_version()} drafts with {type(speculator).__name__}. Drop the flag, or run a "
        f"vLLM {tested_text()} whose runner builds {stock} (`vllm-graft doctor` "
        "shows what has moved)."
    )
