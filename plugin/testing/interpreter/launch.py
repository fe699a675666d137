"""Cost of a launch in the interpreter of triton 3.9.0."""

import dataclasses
import functools
import inspect
from typing import Any

import numpy as np


def mend() -> None:
    """Launch on the caller's memory, and patch ``triton.language`` once per process."""
    from triton.runtime import interpreter

    # Stock copies the whole storage of every argument to the host and back: with CPU tensors that
    # is a copy onto itself, of the whole KV cache, at every launch.
    interpreter.GridExecutor._init_args_hst = lambda self, args, kwargs: (list(args), dict(kwargs))
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    interpreter._patch_lang = _PatchOnce(interpreter)
    interpreter._get_np_dtype = _cached_by_scalar(interpreter._get_np_dtype)
    interpreter.inspect = _CachedSignatures()
    interpreter._implicit_cvt = _cached_by_type(interpreter._implicit_cvt)
    # Stock computes each integer sum and product again in 64 bits, for a debug build's assertion.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    _silence(interpreter.GridExecutor)


def _cached_by_scalar(stock: Any) -> Any:
    """Stock builds the table of all types at each look-up."""
    import triton.language as tl

    of_scalar = functools.cache(stock)
    address = np.dtype(np.uint64)

    def lookup(dtype: Any) -> Any:
        scalar = dtype.scalar
        return address if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return lookup


def _cached_by_type(stock: Any) -> Any:
    """Stock names the type of each argument and parses the name, and makes new types of blocks."""
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    of_number, kinds = functools.lru_cache(4096)(stock), dict[Any, Any]()

    def convert(argument: Any) -> Any:
        if type(argument) is int:
            return of_number(argument)
        if not isinstance(argument, torch.Tensor):
            return stock(argument)
        kind = kinds.get(argument.dtype)
        if kind is None:
            kind = kinds[argument.dtype] = stock(argument).type
        address = np.array([argument.data_ptr()], np.uint64)
        return tl.tensor(TensorHandle(address, kind), kind)

    return convert


def _silence(executor: Any) -> None:
    """A masked-off lane may divide by zero: no error on a GPU, a warning of NumPy here."""
    stock = executor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            stock(self, *args, **kwargs)

    executor.__call__ = launch


class _CachedSignatures:
    """Stands for ``inspect``; stock reads a kernel's signature anew at each launch."""

    def __init__(self) -> None:
        self.getfullargspec = functools.cache(inspect.getfullargspec)
        self._signature = functools.cache(inspect.signature)

    def getcallargs(self, function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = self._signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


class _PatchOnce:
    """Stock walks all of ``triton.language`` at each launch and at each ``tl.sum`` inside it."""

    def __init__(self, interpreter: Any) -> None:
        self._stock = interpreter._patch_lang
        self._empty = interpreter._LangPatchScope
        self._done = False

    def __call__(self, fn: Any) -> Any:
        if not self._done:
            self._done = True
            self._stock(_EveryLanguageModule())
        return self._empty()


class _EveryLanguageModule:
    """Stands for a kernel that sees both ``triton.language`` and ``triton.language.core``."""

    def __init__(self) -> None:
        import triton.language as tl

        self.__globals__ = {"tl": tl, "core": tl.core}
