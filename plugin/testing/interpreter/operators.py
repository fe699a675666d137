"""Cost of an operator in the interpreter of triton 3.9.0: one call of NumPy for each.

Stock takes ten calls of Python from ``a + b`` to ``np.add``: they unwrap constants, find out which
type the two operands promote to, spread a scalar over a block, and choose the builder's method.
Operands whose element types are one, or of which one is a number, need none of that: NumPy
broadcasts, and its result has the type of the block. All others go to stock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_graft.testing.interpreter.literals import Literals

Array = np.ndarray[Any, Any]

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


class Operators:
    """Replacements for the operators of ``triton.language.tensor``, and for ``where``.

    Args:
        literals: makes tensors of numbers.
    """

    def __init__(self, literals: Literals) -> None:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle, interpreter_semantic

        self._tensor, self._constexpr = tl.tensor, tl.constexpr
        self._handle, self._semantic = TensorHandle, interpreter_semantic
        self._truth = tl.int1
        # NumPy computes in these types what a GPU computes. The small floats are bits to it.
        self._literals, integers = literals, literals.integers
        floats = {id(tl.float32), id(tl.float64)}
        self._numbers = integers | floats
        self._integers = integers
        self._bits = integers | {id(tl.int1)}

    def replace(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the faster form of the operator, or ``stock`` if there is none.

        Args:
            name: Attribute of ``triton.language.tensor``, such as ``__add__``.
            stock: What the interpreter has put there.
        """
        bare = name.strip("_")
        reflected = bare not in _ARITHMETIC and bare[:1] == "r" and bare[1:] in _ARITHMETIC
        operation = _ARITHMETIC.get(bare[1:] if reflected else bare)
        if operation is not None:
            pointers = bare == "add"
            return self._operator(operation, self._numbers, stock, reflected, pointers)
        if bare in _BITS:
            return self._operator(_BITS[bare], self._bits, stock)
        if bare in _COMPARISONS:
            return self._comparison(_COMPARISONS[bare], stock)
        if bare == "truediv":
            return self._operator(np.divide, self._numbers - self._integers, stock)
        return stock

    def where(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Return the faster form of ``triton.language.where``."""

        def apply(condition: Any, x: Any, y: Any, **keywords: Any) -> Any:
            if type(condition) is self._tensor and condition.dtype is self._truth:
                found = self._branches(x, y)
                if found is not None:
                    kind, *values = found
                    blocks = [t for t in (condition.type, kind) if t.is_block()]
                    if len(blocks) < 2 or blocks[0]._graft_sizes == blocks[1]._graft_sizes:
                        if blocks:
                            kind = blocks[0].with_element_ty(kind.scalar)
                        chosen = np.where(condition.handle.data, *values)
                        return self._tensor(self._handle(chosen, kind.scalar), kind)
            return stock(condition, x, y, **keywords)

        return apply

    def _branches(self, x: Any, y: Any) -> tuple[Any, Array, Array] | None:
        """The type of two values of which one is chosen, and both; or None."""
        if type(x) is self._tensor:
            found = self._operands(x, y, self._numbers)
            return None if found is None else (found[0], x.handle.data, found[1])
        if type(y) is self._tensor:
            found = self._operands(y, x, self._numbers)
            return None if found is None else (found[0], found[1], y.handle.data)
        return None

    def _operator(
        self,
        operation: Callable[[Array, Array], Array],
        served: set[int],
        stock: Callable[..., Any],
        reflected: bool = False,
        pointers: bool = False,
    ) -> Callable[..., Any]:
        operands, tensor, handle = self._operands, self._tensor, self._handle

        def apply(left: Any, right: Any, **_: Any) -> Any:
            found = operands(left, right, served)
            if found is None:
                moved = self._moved(left, right) if pointers else None
                return stock(left, right) if moved is None else moved
            kind, other = found
            pair = (other, left.handle.data) if reflected else (left.handle.data, other)
            return tensor(handle(operation(*pair), kind.scalar), kind)

        return apply

    def _comparison(
        self, operation: Callable[[Array, Array], Array], stock: Callable[..., Any]
    ) -> Callable[..., Any]:
        operands, tensor, handle = self._operands, self._tensor, self._handle
        served, truth = self._numbers, self._truth

        def apply(left: Any, right: Any, **_: Any) -> Any:
            found = operands(left, right, served)
            if found is None:
                return stock(left, right)
            kind, other = found
            outcome = kind.with_element_ty(truth) if kind.is_block() else truth
            return tensor(handle(operation(left.handle.data, other), truth), outcome)

        return apply

    def _operands(self, left: Any, right: Any, served: set[int]) -> tuple[Any, Array] | None:
        """The result's type and the right operand's values, or None if stock has to decide."""
        kind = left.type
        scalar = kind.scalar
        if id(scalar) not in served:
            return None
        if type(right) is self._tensor:
            other = right.type
            if other is kind or other is scalar:
                return kind, right.handle.data
            return (other, right.handle.data) if kind is other.scalar else None
        if type(right) is self._constexpr:
            right = right.value
        constant = self._literals.make(self._semantic, right, scalar)
        return None if constant is None else (kind, constant.handle.data)

    def _moved(self, pointer: Any, offset: Any) -> Any:
        """Pointers plus signed offsets of one shape, or of one block and one scalar."""
        if type(offset) is not self._tensor or not pointer.dtype.is_ptr():
            return None
        step = offset.dtype
        if id(step) not in self._integers or not step.is_int_signed():
            return None
        kind, other = pointer.type, offset.type
        if kind.is_block():
            if other.is_block() and kind._graft_sizes != other._graft_sizes:
                return None
        elif other.is_block():
            kind = other.with_element_ty(kind)
        width = max(1, kind.scalar.element_ty.primitive_bitwidth // 8)
        moved = pointer.handle.data + width * offset.handle.data.astype(np.uint64)
        return self._tensor(self._handle(moved, kind.scalar), kind)
