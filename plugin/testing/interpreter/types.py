"""Cost of an operation in the interpreter of triton 3.9.0: its types, operands and constants.

Stock builds a new block type and new lists of constants for each tensor, and finds out anew which
types two operands promote to. Here each type is built once and knows what its tensors share, and
the common cases are recognized at once. All others go to stock.
"""

from __future__ import annotations

from typing import Any

from vllm_graft.testing.interpreter.operators import Literals, Operators


def mend() -> None:
    """Patch types, tensors and operands; before ``triton.language`` itself is patched."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import TensorHandle

    _mend_equality(tl.dtype)
    _mend_equality(tl.block_type)
    _mend_scalars(tl.dtype, tl.pointer_type, tl.block_type)
    _mend_block_types(tl.block_type)
    _mend_tensors(tl.tensor)
    _mend_handles(TensorHandle)
    _mend_casts(TritonSemantic)
    _mend_broadcasts(TritonSemantic)
    literals = Literals()
    _mend_operands(TritonSemantic, literals)
    _mend_builtins(literals)


def _mend_equality(kind: Any) -> None:
    stock = kind.__eq__
    kind.__eq__ = lambda self, other: self is other or stock(self, other)


def _mend_scalars(dtype: Any, pointer_type: Any, block_type: Any) -> None:
    """``scalar``, which is read several times an operation, is an attribute and no property."""
    for kind in (dtype, pointer_type, block_type):
        del kind.scalar

    def __getattr__(self: Any, name: str) -> Any:
        # A block has its own from the start. Any other type is its own scalar.
        if name != "scalar":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.scalar = self
        return self

    dtype.__getattr__ = __getattr__


def _mend_block_types(block_type: Any) -> None:
    """One object for each element type and shape; it lives as long as the element type does."""
    stock = block_type.__init__

    def __new__(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
        sizes = tuple(size if type(size) is int else getattr(size, "value", 0) for size in shape)
        known = getattr(element_ty, "_graft_blocks", {}).get(sizes)
        if known is not None:
            return known
        return object.__new__(cls)

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        if "numel" not in self.__dict__:
            self.scalar = element_ty
            stock(self, element_ty, shape)
            self._graft_sizes = tuple(self.shape)
            element_ty.__dict__.setdefault("_graft_blocks", {})[self._graft_sizes] = self

    stock_with = block_type.with_element_ty

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        known = scalar_ty.__dict__.get("_graft_blocks", {}).get(self._graft_sizes)
        return stock_with(self, scalar_ty) if known is None else known

    block_type.__new__, block_type.__init__ = __new__, __init__
    block_type.with_element_ty = with_element_ty


def _mend_tensors(tensor: Any) -> None:
    """Tensors of one type share their shape, a tuple of constants that nothing changes."""
    stock = tensor.__init__

    def __init__(self: Any, handle: Any, type: Any) -> None:
        parts = type.__dict__.get("_graft_parts")
        if parts is None:
            stock(self, handle, type)
            type._graft_parts = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = parts

    tensor.__init__ = __init__


def _mend_handles(handle: Any) -> None:
    """Stock checks the size of the data against the type in three more calls."""
    from triton.language import pointer_type

    def __init__(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype = data, dtype
        self.attr = {} if attr is None else attr
        if data.itemsize > 1 and type(dtype) is not pointer_type and data.itemsize > dtype.itemsize:
            self.__post_init__()

    handle.__init__ = __init__


def _mend_casts(semantic: Any) -> None:
    stock = semantic.cast

    def cast(self: Any, input: Any, dst_ty: Any, *args: Any, **kwargs: Any) -> Any:
        if input.dtype is dst_ty:
            return input
        return stock(self, input, dst_ty, *args, **kwargs)

    semantic.cast = cast


def _mend_broadcasts(semantic: Any) -> None:
    """Operands of one shape stay as they are; a scalar is spread with no detour over IR types."""
    import numpy as np
    from triton.runtime import interpreter

    stock = semantic.broadcast_impl_value

    def spread(self: Any, scalar: Any, block: Any) -> Any:
        handle, wide = scalar.handle, block.with_element_ty(scalar.dtype)
        data = np.empty(wide._graft_sizes, interpreter._get_np_dtype(handle.dtype))
        data[...] = handle.data
        return self.make_tensor(interpreter.TensorHandle(data, handle.dtype.scalar), wide)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left is right:
            return lhs, rhs
        if not right.is_block():
            return lhs, spread(self, rhs, left) if left.is_block() else rhs
        if not left.is_block():
            return spread(self, lhs, right), rhs
        if left._graft_sizes == right._graft_sizes:
            return lhs, rhs
        return stock(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value


def _mend_operands(semantic: Any, literals: Literals) -> None:
    """Two tensors of one type need no promotion, and an integer becomes of the tensor's type."""
    import triton.language as tl

    stock = semantic.binary_op_type_checking_impl
    plain = {id(tl.int1), id(tl.float32), *literals.integers}

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
            same = lhs.dtype is rhs.dtype and id(lhs.dtype) in plain
            moved = (
                allow_lhs_ptr
                and type(lhs.dtype) is tl.pointer_type
                and id(rhs.dtype) in literals.integers
            )
            if same or moved:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check:
            if type(lhs) is tl.tensor:
                constant = literals.make(self, rhs, lhs.dtype)
                if constant is not None:
                    return self.broadcast_impl_value(lhs, constant)
            elif type(rhs) is tl.tensor:
                constant = literals.make(self, lhs, rhs.dtype)
                if constant is not None:
                    return self.broadcast_impl_value(constant, rhs)
        return stock(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = check


def _mend_builtins(literals: Literals) -> None:
    """Stock copies the keywords of each call to leave out the one that it then adds."""
    import triton.language as tl
    from triton.runtime import interpreter

    from vllm_graft.testing.interpreter.loads import Loads

    # What the decorator wraps around a function: it checks for that keyword, and calls.
    wrapper = tl.core.builtin(lambda: None).__code__

    operators, loads = Operators(literals), Loads(literals)

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.interpreter_semantic
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        if obj is tl.tensor:
            builtin = operators.replace(name, builtin)
        elif name == "where":
            builtin = operators.where(builtin)
        elif name == "load" and obj in (tl, tl.core):
            builtin = loads.replace(builtin)
        scope.set_attr(obj, name, builtin)

    interpreter._patch_attr = patch
