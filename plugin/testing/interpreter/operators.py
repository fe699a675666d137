"""Cost of an operator in the interpreter of triton 3.9.0: one call of NumPy for each. Stock takes
ten calls of Python from ``a + b`` to ``np.add``. Operands of one element type, signed integers, and
a number beside a tensor need none of them: NumPy broadcasts. All others go to stock."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
# As on a GPU, a quotient is rounded towards zero and a remainder has the dividend's sign.
_DIVISIONS: dict[str, Callable[[Array, Array], Array]] = {
    "floordiv": lambda x, y: (x - np.fmod(x, y)) // y,
    "mod": np.fmod,
}
_SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


class Literals:
    """Makes a number beside a tensor a tensor of its type, where stock does so; integers once."""

    def __init__(self) -> None:
        import triton.language as tl

        names = [*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES]
        self._float = tl.float32
        self.integers = {id(getattr(tl, name)) for name in names if name != "int1"}
        self._numbers = {id(tl.float32), *self.integers}
        self._made: dict[tuple[int, int], Any] = {}

    def make(self, semantic: Any, value: Any, dtype: Any) -> Any:
        """The number as a tensor, or None if stock has to say of which type."""
        if type(value) is int and id(dtype) in self._numbers:
            key = value, id(dtype)
            if key not in self._made:
                self._made[key] = semantic._cast_to_computation_type(value, dtype)
            return self._made[key]
        # Floats are made anew: 0.0 and -0.0 are equal keys, and no NaN equals itself.
        if type(value) is float and dtype is self._float:
            return semantic._cast_to_computation_type(value, dtype)
        return None


class Operators:
    """Replacements for the operators of ``triton.language.tensor``, and for ``where``."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle, interpreter_semantic

        self._tensor, self._constexpr = tl.tensor, tl.constexpr
        self._handle, self._semantic = TensorHandle, interpreter_semantic
        self._truth = tl.int1
        # NumPy computes in these types what a GPU computes. The small floats are bits to it.
        self._literals = Literals()
        self._integers = self._literals.integers
        self._numbers = self._integers | {id(tl.float32), id(tl.float64)}
        self._bits = self._integers | {id(tl.int1)}
        self._signed = {id(getattr(tl, name)) for name in tl.dtype.SINT_TYPES if name != "int1"}
        self._block = tl.block_type

    def replace(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """The faster form of an operator such as ``__add__``, or ``stock`` if there is none."""
        bare = name.strip("_")
        reflected = bare not in _ARITHMETIC and bare[:1] == "r" and bare[1:] in _ARITHMETIC
        operation = _ARITHMETIC.get(bare[1:] if reflected else bare)
        if operation is not None:
            pointers = bare == "add"
            return self._operator(operation, self._numbers, stock, reflected, pointers)
        if bare in _DIVISIONS:
            return self._operator(_DIVISIONS[bare], self._integers, stock)
        if bare in _SHIFTS:
            return self._operator(_SHIFTS[bare], self._integers, stock)
        if bare in _BITS:
            return self._operator(_BITS[bare], self._bits, stock)
        if bare in _COMPARISONS:
            return self._comparison(_COMPARISONS[bare], stock)
        if bare == "getitem":
            return self._axes(stock)
        if bare == "truediv":
            return self._operator(np.divide, self._numbers - self._integers, stock)
        return stock

    def where(self, stock: Callable[..., Any]) -> Callable[..., Any]:
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
        if type(x) is self._tensor:
            return self._operands(x, y, self._numbers)
        if type(y) is self._tensor:
            found = self._operands(y, x, self._numbers)
            return None if found is None else (found[0], found[2], found[1])
        return None

    def _axes(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """New axes of a block, such as ``block[:, None]``."""

        def apply(block: Any, slices: Any, **_: Any) -> Any:
            if type(slices) is tuple and block.type.is_block():
                shape = _with_axes(block.type._graft_sizes, tuple(s is None for s in slices))
                if shape is not None and all(s is None or s == slice(None) for s in slices):
                    kind, handle = self._block(block.dtype, list(shape)), block.handle
                    return self._tensor(
                        self._handle(handle.data.reshape(shape), handle.dtype), kind
                    )
            return stock(block, slices)

        return apply

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
            kind, first, second = found
            if reflected:
                first, second = second, first
            return tensor(handle(operation(first, second), kind.scalar), kind)

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
            kind, first, second = found
            outcome = kind.with_element_ty(truth) if kind.is_block() else truth
            return tensor(handle(operation(first, second), truth), outcome)

        return apply

    def _operands(self, left: Any, right: Any, served: set[int]) -> tuple[Any, Array, Array] | None:
        """The result's type and the values of both operands, or None if stock has to decide."""
        kind = left.type
        scalar = kind.scalar
        if id(scalar) not in served:
            return None
        if type(right) is self._tensor:
            other = right.type
            if other is kind or other is scalar:
                return kind, left.handle.data, right.handle.data
            if kind is other.scalar:
                return other, left.handle.data, right.handle.data
            return self._promoted(left, right, served)
        if type(right) is self._constexpr:
            right = right.value
        constant = self._literals.make(self._semantic, right, scalar)
        return None if constant is None else (kind, left.handle.data, constant.handle.data)

    def _promoted(self, left: Any, right: Any, served: set[int]) -> tuple[Any, Array, Array] | None:
        """The same for blocks of two shapes and for signed integers, of which the wider decides."""
        kind, other = left.type, right.type
        wide, narrow = kind.scalar, other.scalar
        if wide is not narrow:
            if served is self._bits or not {id(wide), id(narrow)} <= self._signed:
                return None
            wide = max(wide, narrow, key=lambda scalar: scalar.int_bitwidth)
        result = self._joined(kind, other, wide)
        # NumPy computes in the wider of two types as well.
        return None if result is None else (result, left.handle.data, right.handle.data)

    def _joined(self, kind: Any, other: Any, scalar: Any) -> Any:
        """The type of a result of elements ``scalar``, or None for blocks that do not fit."""
        if not kind.is_block():
            return other.with_element_ty(scalar) if other.is_block() else scalar
        if not other.is_block():
            return kind.with_element_ty(scalar)
        sizes = broadcast(kind._graft_sizes, other._graft_sizes)
        return None if sizes is None else self._block(scalar, list(sizes))

    def _moved(self, pointer: Any, offset: Any) -> Any:
        """Pointers plus signed offsets or a number, broadcast."""
        if not pointer.dtype.is_ptr():
            return None
        kind = pointer.type
        width = max(1, kind.scalar.element_ty.primitive_bitwidth // 8)
        if type(offset) is self._constexpr:
            offset = offset.value
        if type(offset) is int and -(2**31) <= offset < 2**31:
            moved = pointer.handle.data + np.uint64(width * offset % 2**64)
        elif type(offset) is self._tensor and id(offset.dtype) in self._signed:
            kind = self._joined(kind, offset.type, kind.scalar)
            if kind is None:
                return None
            moved = pointer.handle.data + width * offset.handle.data.astype(np.uint64)
        else:
            return None
        return self._tensor(self._handle(moved, kind.scalar), kind)


@functools.cache
def broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that two shapes of one rank are spread to; None if stock has to decide."""
    if len(left) != len(right):
        return None
    if any(a != b and 1 not in (a, b) for a, b in zip(left, right)):
        return None
    return tuple(map(max, left, right))


@functools.cache
def _with_axes(sizes: tuple[int, ...], new: tuple[bool, ...]) -> tuple[int, ...] | None:
    """The shape with an axis of one where ``new`` says so; None if there are too many indices."""
    if new.count(False) > len(sizes):
        return None
    rest = iter(sizes)
    return (*(1 if added else next(rest) for added in new), *rest)
