"""Python syntax that the interpreter of triton 3.9.0 reads otherwise than the compiler."""

import ast
from collections.abc import Callable, Iterable
from typing import Any


def mend() -> None:
    """Rewrite ``and``, ``or``, ``not`` and ``for ... in range`` as the compiler lowers them."""
    from triton.runtime import interpreter

    # The rewriter copies the interpreter's globals into those of each kernel.
    interpreter._graft_bool_op = _bool_op
    interpreter._graft_not = _not
    interpreter._graft_iterate = _iterate
    transformer = interpreter.ASTTransformer
    transformer.visit_BoolOp = _visit_bool_op
    transformer.visit_UnaryOp = _visit_unary_op
    transformer.visit_For = _visit_for


def _call(name: str, args: list[ast.expr], at: ast.AST) -> ast.expr:
    node = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=args, keywords=[])
    return ast.copy_location(node, at)


def _visit_bool_op(self: ast.NodeTransformer, node: ast.BoolOp) -> ast.expr:
    self.generic_visit(node)
    nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    thunks: list[ast.expr] = [ast.Lambda(args=nothing, body=value) for value in node.values]
    method = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
    return _call("_graft_bool_op", [ast.Constant(method), *thunks], node)


def _bool_op(method: str, *thunks: Callable[[], Any]) -> Any:
    """``a and b``: stock uses the truth of a block, which is always true, and returns ``b``. As in
    the compiler every tensor operand is evaluated; only constants cut the evaluation short."""
    import triton.language as tl

    result: Any = None
    value: Any = None
    for thunk in thunks:
        value = thunk()
        if isinstance(value, tl.tensor):
            result = value if result is None else getattr(result, method)(value)
        elif bool(value) == (method == "logical_or"):
            return value
    return value if result is None else result


def _visit_unary_op(self: ast.NodeTransformer, node: ast.UnaryOp) -> ast.expr:
    self.generic_visit(node)
    return _call("_graft_not", [node.operand], node) if isinstance(node.op, ast.Not) else node


def _not(value: Any) -> Any:
    """``not block``: stock gives the constant ``False``."""
    import triton.language as tl
    from triton.runtime import interpreter

    if isinstance(value, tl.tensor):
        return interpreter.interpreter_semantic.not_(value)
    return not value


def _visit_for(self: ast.NodeTransformer, node: ast.For) -> ast.For:
    self.generic_visit(node)
    function = node.iter.func if isinstance(node.iter, ast.Call) else None
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)
    if name == "range":
        node.iter = _call("_graft_iterate", [node.iter], node.iter)
    return node


def _iterate(values: Iterable[int]) -> Iterable[Any]:
    """The index of ``range`` and ``tl.range`` is a scalar tensor: ``i.to(tl.int64)`` is legal."""
    from triton.runtime import interpreter

    return (interpreter.interpreter_semantic.to_tensor(i, False) for i in values)
