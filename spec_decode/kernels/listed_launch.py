"""Launches of kernels as values: which specialisation a launch needs, known without a launch.
Triton compiles a kernel once per *specialisation*: the dtypes of its pointers, whether each is a
multiple of 16, which integers are 1 or multiples of 16, the constants and the options. While
launches are listed, the functions that launch kernels run as ever, also over ``meta`` tensors."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

ALIGNMENT = 16
"""Triton compiles loads of addresses and strides that are multiples of it as wider ones."""

_INT32 = range(-(1 << 31), 1 << 31)

Note = Callable[["Launch"], object]

_note: Note | None = None
_launches = True


class Pointer(NamedTuple):
    """What Triton looks at in a tensor: dtype, such as ``int64``, and alignment of the address."""

    dtype: str
    aligned: bool


@dataclass(frozen=True)
class Launch:
    """One specialisation of a kernel. Equal launches share what is compiled. `kernel`:
    ``"package.module:function"``. `arguments`: name and value of each: a `Pointer`, a constant as
    it is, or a number that stands for all numbers of its kind. `options`: name and value of those
    such as ``num_warps``, in the call's order."""

    kernel: str
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]


class Kernel:
    """Put over ``triton.jit``: a kernel whose launches can be listed; it launches as ever."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__name__, self.__doc__ = fn.__name__, python_function(fn).__doc__

    def __getitem__(self, grid: Any) -> Any:
        if _note is None:
            return self.fn[grid]
        return functools.partial(self._noted, grid)

    def _noted(self, grid: Any, *args: Any, **kwargs: Any) -> Any:
        assert _note is not None
        _note(describe(self.fn, args, kwargs))
        return self.fn[grid](*args, **kwargs) if _launches else None


@contextlib.contextmanager
def listing(note: Note, *, launch: bool = False) -> Iterator[None]:
    """A context in which `note` gets each launch of a `Kernel`, in this whole process. The kernels
    themselves run only with `launch`."""
    global _note, _launches
    before = _note, _launches
    _note, _launches = note, launch
    try:
        yield
    finally:
        _note, _launches = before


def describe(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    """The specialisation that a call of a kernel of Triton's needs."""
    constants, plain = _kinds(fn)
    given = {**dict(zip(fn.arg_names, args)), **kwargs}
    function = python_function(fn)
    return Launch(
        kernel=f"{function.__module__}:{function.__qualname__}",
        arguments=tuple(
            (name, given[name] if name in constants else _value(given[name], name not in plain))
            for name in fn.arg_names
        ),
        options=tuple((name, v) for name, v in kwargs.items() if name not in fn.arg_names),
    )


def python_function(fn: Any) -> Any:
    """The Python function of a kernel, whatever wraps it."""
    while not inspect.isfunction(fn):
        fn = fn.fn
    return fn


@functools.cache
def _kinds(fn: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Names of a kernel's constants, and of the numbers that it is not specialised for."""
    parameters = inspect.signature(python_function(fn)).parameters.values()
    constants = {each.name for each in parameters if "constexpr" in str(each.annotation)}
    # The interpreter, which specialises nothing, keeps the decorator's arguments.
    plain = getattr(fn, "do_not_specialize", None)
    plain = getattr(fn, "kwargs", {}).get("do_not_specialize") if plain is None else plain
    return frozenset(constants), frozenset(plain or ())


def _value(value: Any, specialised: bool) -> Any:
    """What stands for all values of an argument that share a specialisation."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _number(value, specialised)
    if isinstance(value, float):
        return 0.5
    dtype = str(value.dtype).removeprefix("torch.")
    address = value.storage_offset() * value.element_size() if value.is_meta else value.data_ptr()
    return Pointer(dtype, address % ALIGNMENT == 0)


def _number(value: int, specialised: bool) -> int:
    wide = 0 if value in _INT32 else 1 << 40
    if specialised and value == 1:
        return 1
    return wide + (ALIGNMENT if specialised and value % ALIGNMENT == 0 else 3)
