"""Numbers beside a tensor in the interpreter of triton 3.9.0."""

from __future__ import annotations

from typing import Any


class Literals:
    """Makes a number beside a tensor a tensor of the same type, where stock does so too.

    Each integer is made once per type.
    """

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
