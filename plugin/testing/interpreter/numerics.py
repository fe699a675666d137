"""Arithmetic that the interpreter of triton 3.9.0 gets wrong. bfloat16 and float8 live in NumPy as
raw bits, and most operations compute on the bits (triton issues 4972, 8322 and 11584). Here they
are computed in float32 and rounded to nearest even, as a GPU does for a single operation."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mend() -> None:
    """Mend casts, arithmetic, dot, reductions, scans, comparisons and libdevice."""
    from triton.runtime import interpreter

    interpreter.ReduceOps.generic_reduce = _reduce_in_halves
    builder = interpreter.InterpreterBuilder
    _mend_comparisons(builder)
    for name, operands in _ARITHMETIC.items():
        setattr(builder, name, _in_float32(getattr(builder, name), operands))
    _mend_casts(builder)
    _mend_dot(builder)
    for collective in (interpreter.ReduceOps, interpreter.ScanOps):
        collective.apply_impl = _collective_in_float32(collective.apply_impl)
    _mend_libdevice()


# Method of the builder -> how many of its first arguments are operands.
_ARITHMETIC = {
    "binary_op": 2,
    "unary_op": 1,
    "create_fma": 3,
    "create_clampf": 3,
    "create_rsqrt": 1,
    "create_erf": 1,
}


@functools.cache
def _torch_type(scalar: Any) -> Any:
    """The torch type of the same bits, or None where NumPy computes natively."""
    import torch
    import triton.language as tl

    return {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }.get(scalar)


def _decode(data: Array, scalar: Any) -> Array:
    """Raw bits of a small float -> float32."""
    import torch

    bits = torch.from_numpy(np.array(data))
    decoded: Array = bits.view(_torch_type(scalar)).float().numpy()
    return decoded


def _encode(data: Array, scalar: Any) -> Array:
    """float32 -> raw bits, to nearest even; float8 saturates as PTX's ``cvt.satfinite`` does."""
    import torch

    small = _torch_type(scalar)
    values = torch.from_numpy(np.array(data, dtype=np.float32))
    if small.itemsize == 1:
        limit = torch.finfo(small).max
        values = values.clamp(-limit, limit)
    bits = values.to(small).view(torch.uint8 if small.itemsize == 1 else torch.uint16)
    encoded: Array = bits.numpy()
    return encoded


def _widen(handle: Any) -> Any:
    """A handle of a small float -> the same values as float32; others unchanged."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if isinstance(handle, TensorHandle) and _torch_type(handle.dtype.scalar) is not None:
        return TensorHandle(_decode(handle.data, handle.dtype.scalar), tl.float32)
    return handle


def _in_float32(stock: Callable[..., Any], operands: int) -> Callable[..., Any]:
    def mended(self: Any, *args: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        # Small floats are stored as 8 or 16 bits without a sign; all else NumPy has natively.
        for handle in args[:operands]:
            if handle.data.dtype.char in "BH":
                break
        else:
            return stock(self, *args)
        wide = [_widen(handle) for handle in args[:operands]]
        small = next((old.dtype.scalar for old, new in zip(args, wide) if new is not old), None)
        if small is None:
            return stock(self, *args)
        result = stock(self, *wide, *args[operands:])
        if result.dtype.scalar != tl.float32:
            return result
        return TensorHandle(_encode(result.data, small), small)

    return mended


def _mend_comparisons(builder: Any) -> None:
    """Stock labels the result of ``a < b`` with the type of ``a``; splatting it makes integers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    stock = builder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = stock(self, lhs, rhs, op)
        if result.data.dtype == np.bool_ and result.dtype.scalar != tl.int1:
            return TensorHandle(result.data, tl.int1)
        return result

    builder.binary_op = binary_op


def _mend_casts(builder: Any) -> None:
    """Stock truncates float32 to bfloat16, casts integers to bits, and knows no float8 NaN."""
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    def convert(src: Any, dst_type: Any) -> Any:
        wide, target = _widen(src), dst_type.scalar
        if _torch_type(target) is not None:
            return TensorHandle(_encode(wide.data, target), target)
        return TensorHandle(wide.data.astype(_get_np_dtype(target)), target)

    def is_small(*types: Any) -> bool:
        return any(_torch_type(ty.scalar) is not None for ty in types)

    stock_cast, stock_float = builder.cast_impl, builder.create_fp_to_fp

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if is_small(src.dtype, dst_type):
            return convert(src, dst_type)
        return stock_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if is_small(src.dtype, dst_type) and rounding != ir.ROUNDING_MODE.RTZ:
            return convert(src, dst_type)
        return stock_float(self, src, dst_type, rounding)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp


def _mend_dot(builder: Any) -> None:
    stock = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        return stock(self, _widen(a), _widen(b), acc, *rest)

    builder.create_dot = create_dot


def _collective_in_float32(stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply_impl(self: Any, inputs: tuple[Any, ...]) -> Any:
        import triton.language as tl

        smalls = [i.dtype if _torch_type(i.dtype) is not None else None for i in inputs]
        if not any(smalls):
            return stock(self, inputs)
        wide = tuple(
            i if small is None else self.to_tensor(_decode(i.handle.data, small), tl.float32)
            for i, small in zip(inputs, smalls, strict=True)
        )
        results = stock(self, wide)
        many = list(results) if isinstance(results, (list, tuple)) else [results]
        for place, result in enumerate(many):
            small = next((s for s in smalls if s is not None), None)
            if result.dtype == tl.float32:
                bits = _encode(result.handle.data, small)
                many[place] = self.to_tensor(bits if result.type.is_block() else bits[0], small)
        return many

    return apply_impl


def _mend_libdevice() -> None:
    """Functions of ``libdevice`` are empty (return None) where no compiler binds them."""
    import triton.language.extra.libdevice as libdevice

    erf = np.vectorize(math.erf, otypes=[np.float64])
    unary: dict[str, Callable[[Array], Array]] = {
        "ceil": np.ceil,
        "erf": lambda x: erf(x).astype(x.dtype),
        "exp": np.exp,
        "expm1": np.expm1,
        "fast_expf": np.exp,
        "fast_logf": np.log,
        "fast_tanhf": np.tanh,
        "floor": np.floor,
        "log": np.log,
        "log1p": np.log1p,
        "nearbyint": np.rint,
        "rint": np.rint,
        "round": np.round,
        "rsqrt": lambda x: 1 / np.sqrt(x),
        "sqrt": np.sqrt,
        "tanh": np.tanh,
        "trunc": np.trunc,
    }
    binary: dict[str, Callable[[Array, Array], Array]] = {
        "div_rn": np.divide,
        "fast_dividef": np.divide,
        "fast_powf": np.power,
        "fmod": np.fmod,
        "pow": np.power,
    }
    for name, function in unary.items():
        setattr(libdevice, name, _unary(function))
    for name, operation in binary.items():
        setattr(libdevice, name, _binary(operation))
    libdevice.isnan = _predicate(np.isnan)
    libdevice.isinf = _predicate(np.isinf)


def _unary(function: Callable[[Array], Array]) -> Callable[..., Any]:
    def apply(x: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import interpreter_builder

        return tl.tensor(interpreter_builder.unary_op(x.handle, function), x.type)

    return apply


def _binary(operation: Callable[[Array, Array], Array]) -> Callable[..., Any]:
    def apply(x: Any, y: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import interpreter_builder, interpreter_semantic

        x, y = interpreter_semantic.to_tensor(x), interpreter_semantic.to_tensor(y)
        x, y = interpreter_semantic.broadcast_impl_value(x, y)
        return tl.tensor(interpreter_builder.binary_op(x.handle, y.handle, operation), x.type)

    return apply


def _predicate(test: Callable[[Array], Array]) -> Callable[..., Any]:
    def apply(x: Any, **_: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        handle = TensorHandle(test(_widen(x.handle).data), tl.int1)
        return tl.tensor(handle, tl.block_type(tl.int1, x.shape) if x.type.is_block() else tl.int1)

    return apply


def _reduce_in_halves(self: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Reduce blocks of one shape along ``self.axis``, or all of each if it is None. Stock flattens
    only the first of several blocks, and calls the kernel's function for every element. Here it is
    called once for every halving, on all pairs of neighbours: results are rounded in the order of a
    tree, as on a GPU, and functions that are not commutative see their arguments in order."""
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
