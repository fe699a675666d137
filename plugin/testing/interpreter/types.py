"""Cost of a tensor in the interpreter of triton 3.9.0: its type and its constants. Stock builds a
new block type and new lists of constants for each tensor, and compares such lists wherever two
tensors meet. Here each type is built once and knows what its tensors share."""

from typing import Any

from vllm_graft.testing.interpreter.accesses import Accesses
from vllm_graft.testing.interpreter.operators import Operators, broadcast


def mend() -> None:
    """Patch types, tensors and builtins; before ``triton.language`` itself is patched."""
    import triton.language as tl

    _mend_block_types(tl.block_type)
    _mend_tensors(tl.tensor)
    _mend_broadcasts(tl)
    _mend_builtins()


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
    # A check of what NumPy has computed, and an empty dictionary, for each value.
    from triton.runtime.interpreter import TensorHandle

    def make(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    TensorHandle.__init__ = make


def _mend_broadcasts(tl: Any) -> None:
    """Blocks of one rank are spread by their sizes; scalars and other ranks go to stock."""
    from triton.language.semantic import TritonSemantic

    stock = TritonSemantic.broadcast_impl_value

    def spread(semantic: Any, block: Any, sizes: tuple[int, ...]) -> Any:
        if block.type._graft_sizes == sizes:
            return block
        kind = tl.block_type(block.type.scalar, list(sizes))
        return tl.tensor(semantic.builder.create_broadcast(block.handle, sizes), kind)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block():
            sizes = broadcast(lhs.type._graft_sizes, rhs.type._graft_sizes)
            if sizes is not None:
                return spread(self, lhs, sizes), spread(self, rhs, sizes)
        return stock(self, lhs, rhs)

    stock_equal = tl.tuple.__eq__

    def __eq__(self: Any, other: Any) -> Any:
        return tl.constexpr(True) if other is self else stock_equal(self, other)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
    tl.tuple.__eq__ = __eq__


def _mend_builtins() -> None:
    """Stock copies the keywords of each call to leave out the one that it then adds."""
    import triton.language as tl
    from triton.runtime import interpreter

    # What the decorator wraps around a function: it checks for that keyword, and calls.
    wrapper = tl.core.builtin(lambda: None).__code__

    operators, accesses = Operators(), Accesses()

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic = interpreter.interpreter_semantic
        function = member.__wrapped__ if member.__code__ is wrapper else member

        def builtin(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        if name in ("load", "store", "to") and obj is not tl.core.tensor_descriptor_base:
            builtin = getattr(accesses, name)(builtin)
        elif obj is tl.tensor:
            builtin = operators.replace(name, builtin)
        elif name == "where":
            builtin = operators.where(builtin)
        scope.set_attr(obj, name, builtin)

    interpreter._patch_attr = patch
