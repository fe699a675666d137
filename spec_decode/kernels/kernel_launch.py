"""Launches of kernels: their sizes, as plain integers, and their specialisations, known without a
launch. Triton's own `cdiv` and `next_power_of_2` take microseconds per call on the host, which add
up over the layers of a step.

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


def cdiv(number: int, divisor: int) -> int:
    """Quotient of two positive integers, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least a positive integer."""
    return 1 << (number - 1).bit_length()


_TOPK_PROGRAMS = 64
"""Most programs per row, except for the largest vocabularies: one program merges their results."""

_MIN_BLOCK, _MAX_BLOCK = 512, 4096
"""Bounds of a program's tokens. They are few, as it takes one maximum after another over all."""


def topk_block(vocab_size: int) -> tuple[int, int]:
    """Tokens and warps of a program that finds the best tokens in a part of a row."""
    block = next_power_of_2(cdiv(vocab_size, _TOPK_PROGRAMS))
    block = min(max(block, _MIN_BLOCK), _MAX_BLOCK)
    return block, block // _MIN_BLOCK


_MANY_PROGRAMS = 512
"""About four for each multiprocessor of a large GPU: with more, one may do what several did."""


def rows_per_program(num_rows: int, nodes: int, blocks: int) -> int:
    """Rows that a program takes of the `nodes` in succession that share their logits. It is the
    largest divisor of `nodes` that leaves many of the ``num_rows * blocks`` programs."""
    fitting = (
        each
        for each in range(nodes, 1, -1)
        if nodes % each == 0 and num_rows // each * blocks >= _MANY_PROGRAMS
    )
    return next(fitting, 1)


def topk_merge_warps(entries: int) -> int:
    """Warps of the program that merges so many best tokens of a row."""
    return 4 if entries > 512 else 1


def rank_block(candidates: int) -> tuple[int, int]:
    """Candidates that a program ranks, and how many others it compares them with at a time."""
    most = next_power_of_2(candidates)
    return min(32, most), min(128, most)


def moved_block(width: int) -> tuple[int, int]:
    """Rows and columns of a program that moves accepted rows of `width` elements."""
    return 8, min(1024, next_power_of_2(width))


def check_rows(*tensors: Any) -> None:
    """Raise a ValueError for a tensor whose last dimension is not contiguous."""
    for tensor in tensors:
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension must be contiguous, strides {tensor.stride()}")


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
