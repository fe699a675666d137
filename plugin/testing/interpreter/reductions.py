"""Reductions by a kernel's own function in the interpreter of triton 3.9.0, and their cost.

Stock flattens only the first of several blocks that are reduced whole, and it calls the function
once for every element. Here it is called once for every halving of the block, on all pairs of
neighbours at once. So results are rounded in the order of a tree, as on a GPU, and functions that
are associative but not commutative see their arguments in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mend() -> None:
    """Replace stock's loop over elements."""
    from triton.runtime import interpreter

    interpreter.ReduceOps.generic_reduce = _reduce_in_halves


def _reduce_in_halves(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Reduce blocks along ``self.axis``, or all of each block if it is None.

    Args:
        self: stock's ``ReduceOps``.
        inputs: tensors of one shape; as many as ``self.combine_fn`` has pairs of arguments.

    Returns:
        One tensor per input, of the same element type.
    """
    types = [block.dtype for block in inputs]
    arrays = [block.handle.data for block in inputs]
    if self.axis is None:
        arrays = [array.ravel() for array in arrays]
    else:
        arrays = [np.moveaxis(array, self.axis, 0) for array in arrays]
    while len(arrays[0]) > 1:
        even, odd = ([array[first::2] for array in arrays] for first in (0, 1))
        arrays = _combined(self, even, odd, types)
    return [
        self.to_tensor(_with_kept_dims(self, array[0], inputs[0]), dtype)
        for array, dtype in zip(arrays, types, strict=True)
    ]


def _combined(self: Any, first: list[Array], second: list[Array], types: list[Any]) -> list[Array]:
    """Call the kernel's function on all pairs; a block's length is a power of two."""
    tensors = [
        self.to_tensor(array, dtype)
        for half in (first, second)
        for array, dtype in zip(half, types, strict=True)
    ]
    found = self.combine_fn.fn(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    # The function may return a constant, and a tensor of another type; stock casts both.
    return [
        np.broadcast_to(
            one.handle.data if hasattr(one, "handle") else np.asarray(one), array.shape
        ).astype(array.dtype)
        for one, array in zip(found, first, strict=True)
    ]


def _with_kept_dims(self: Any, array: Array, block: Any) -> Any:
    if not self.keep_dims:
        return array if self.axis is not None else array.item()
    if self.axis is None:
        return array.reshape([1] * len(block.shape))
    return np.expand_dims(array, self.axis)
