"""Cost of loads, stores and casts in the interpreter of triton 3.9.0: a call of NumPy for each.

Stock looks at cache policies, broadcasts and casts by a dozen calls of Python. Blocks of numbers
that NumPy has natively, masks of their shape and numbers in their place need none of them. All
others go to stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Accesses:
    """Replacements for ``load``, ``store`` and ``to`` of ``triton.language``."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton._C.libtriton import interpreter
        from triton.runtime.interpreter import TensorHandle

        self._tensor, self._handle, self._constexpr = tl.tensor, TensorHandle, tl.constexpr
        self._truth, self._load, self._store = tl.int1, interpreter.load, interpreter.store
        names = [*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES]
        integers = [getattr(tl, name) for name in names if name != "int1"]
        self._native = {id(each): np.dtype(each.name) for each in integers}
        self._integers = {*self._native}
        for each, name in ((tl.float16, "f2"), (tl.float32, "f4"), (tl.float64, "f8")):
            self._native[id(each)] = np.dtype(name)
        # Numbers of which each cast has one result, and `astype` gives it.
        self._widened = {id(tl.float32): np.dtype("f4"), id(tl.float64): np.dtype("f8")}
        self._widened |= {key: self._native[key] for key in self._integers}

    def load(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def apply(pointer: Any, mask: Any = None, other: Any = None, **policy: Any) -> Any:
            found = self._element(pointer)
            inside = None if found is None else self._mask(mask, pointer.handle.data)
            if found is None or inside is None:
                return stock(pointer, mask, other, **policy)
            element, kind = found
            rest = self._values(0 if other is None else other, element, kind, inside.shape)
            if rest is None:
                return stock(pointer, mask, other, **policy)
            handle = self._handle(self._load(pointer.handle.data, inside, rest, kind), element)
            shape = pointer.type
            return self._tensor(
                handle, shape.with_element_ty(element) if shape.is_block() else element
            )

        return apply

    def store(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def apply(pointer: Any, value: Any, mask: Any = None, **policy: Any) -> Any:
            found = self._element(pointer)
            inside = None if found is None else self._mask(mask, pointer.handle.data)
            values = None
            if found is not None and inside is not None:
                values = self._values(value, *found, inside.shape)
            if values is None:
                return stock(pointer, value, mask, **policy)
            self._store(pointer.handle.data, values, inside)
            return None

        return apply

    def to(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def apply(block: Any, dtype: Any, *how: Any, **more: Any) -> Any:
            if isinstance(dtype, self._constexpr):
                dtype = dtype.value
            source, kind = id(block.dtype), self._widened.get(id(dtype))
            if kind is None or how or more:
                return stock(block, dtype, *how, **more)
            if source == id(dtype):
                return block
            if source not in self._integers:
                return stock(block, dtype)
            shape = block.type
            handle = self._handle(block.handle.data.astype(kind), dtype)
            return self._tensor(handle, shape.with_element_ty(dtype) if shape.is_block() else dtype)

        return apply

    def _element(self, pointer: Any) -> tuple[Any, np.dtype[Any]] | None:
        """What a pointer points to, and NumPy's type of it; None if stock has to decide."""
        if type(pointer) is not self._tensor or not pointer.dtype.is_ptr():
            return None
        element = pointer.dtype.element_ty
        kind = self._native.get(id(element))
        return None if kind is None else (element, kind)

    def _mask(self, mask: Any, places: Array) -> Array | None:
        if mask is None:
            return np.ones(places.shape, np.bool_)
        if type(mask) is not self._tensor or mask.dtype is not self._truth:
            return None
        return _spread(mask.handle.data, places.shape)

    def _values(
        self, value: Any, element: Any, kind: np.dtype[Any], shape: tuple[int, ...]
    ) -> Array | None:
        if type(value) is self._constexpr:
            value = value.value
        if type(value) is self._tensor:
            return _spread(value.handle.data, shape) if value.dtype is element else None
        if type(value) is int or (type(value) is float and kind.kind == "f"):
            return np.full(shape, value, kind)
        return None


def _spread(values: Array, shape: tuple[int, ...]) -> Array | None:
    """Values of this shape, a number or a block with axes of one; None for others."""
    if values.shape == shape:
        return values
    if values.size == 1 or (
        values.ndim == len(shape) and all(a in (1, b) for a, b in zip(values.shape, shape))
    ):
        return np.broadcast_to(values.reshape(-1) if values.size == 1 else values, shape)
    return None
