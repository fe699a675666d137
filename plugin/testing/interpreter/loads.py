"""Cost of a load in the interpreter of triton 3.9.0.

Stock spreads mask and other value over all pointers, and makes a new block where there is none.
Here they go to the builder as they are if types and shapes allow. All others go to stock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_graft.testing.interpreter.operators import Literals


class Loads:
    """A replacement for ``triton.language.load``."""

    def __init__(self, literals: Literals) -> None:
        import triton.language as tl
        from triton.runtime import interpreter

        self._tensor, self._constexpr, self._truth = tl.tensor, tl.constexpr, tl.int1
        self._handle, self._interpreter = interpreter.TensorHandle, interpreter
        self._literals = literals
        # A pointer to truth values reads bytes, and a pointer to pointers is none of ours.
        self._served = literals.integers | {id(tl.float16), id(tl.float32), id(tl.float64)}
        self._constant = functools.cache(self._filled)

    def replace(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
            loaded = self._load(pointer, mask, other)
            return stock(pointer, mask, other, **options) if loaded is None else loaded

        return load

    def _load(self, pointer: Any, mask: Any, other: Any) -> Any:
        """What is read, or None if stock has to decide."""
        if type(pointer) is not self._tensor or not pointer.dtype.is_ptr():
            return None
        kind, element = pointer.type, pointer.dtype.element_ty
        if id(element) not in self._served:
            return None
        shape = pointer.handle.data.shape
        where = self._mask(mask, kind, shape)
        value = self._other(other, kind, element, shape)
        if where is None or value is None or (mask is None and other is not None):
            return None
        builder = self._interpreter.interpreter_builder
        handle = builder.create_masked_load(pointer.handle, where, value, None, False)
        return self._tensor(handle, kind.with_element_ty(element) if kind.is_block() else element)

    def _mask(self, mask: Any, kind: Any, shape: tuple[int, ...]) -> Any:
        if mask is None:
            return self._constant(self._truth, shape, 1)
        if type(mask) is not self._tensor or mask.dtype is not self._truth:
            return None
        return self._spread(mask, kind, shape)

    def _other(self, other: Any, kind: Any, element: Any, shape: tuple[int, ...]) -> Any:
        if type(other) is self._constexpr:
            other = other.value
        if other is None:
            return self._constant(element, shape, 0)
        if type(other) is self._tensor:
            return self._spread(other, kind, shape) if other.dtype is element else None
        number = self._literals.make(self._interpreter.interpreter_semantic, other, element)
        return None if number is None else self._spread(number, kind, shape)

    def _spread(self, block: Any, kind: Any, shape: tuple[int, ...]) -> Any:
        """The values for each pointer; None if there are more of them than pointers."""
        if block.type.is_block():
            if not kind.is_block() or len(block.type._graft_sizes) != len(shape):
                return None
            if any(own not in (1, all_) for own, all_ in zip(block.type._graft_sizes, shape)):
                return None
        data = block.handle.data
        if data.shape == shape:
            return block.handle
        return self._handle(np.broadcast_to(data, shape), block.dtype)

    def _filled(self, scalar: Any, shape: tuple[int, ...], number: int) -> Any:
        """Made once: a load reads its mask and its other value, and changes neither."""
        return self._handle(np.full(shape, number, self._interpreter._get_np_dtype(scalar)), scalar)
