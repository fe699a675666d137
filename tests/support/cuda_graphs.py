"""A recording stand-in for CUDA graphs.

Capture runs the region once and records every operator and interpreted Triton launch with the very
tensors that it touched. Replay poisons the memory that the region allocated, and runs this list and
nothing else. So a rebound input, a frozen Python scalar, a result that the next replay overwrites,
and a host synchronisation under capture show on a CPU. A copy to the host that goes through neither
``item``, ``tolist`` nor ``numpy`` does not.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from vllm_graft.base.errors import GraftError

PoolId = tuple[int, int]

# Need a value on the host, or a shape that depends on values: both wait for the device.
_SYNCHRONISING = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
# Allocate and write nothing, so a replay finds poison there.
_ALLOCATING = {
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}
# Operators of these namespaces are Python functions: what they do inside is recorded.
_PYTHON_NAMESPACES = {"vllm"}


class CaptureError(GraftError):
    """The captured region does what CUDA forbids under capture."""


class CUDAGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.replays = 0
        self._work: list[Callable[[], None]] = []
        self._private: list[torch.Tensor] = []
        self._host: dict[int, torch.Tensor] = {}
        self._pool: PoolId | None = None
        self._recorder: _Recorder | None = None

    def __len__(self) -> int:
        """Number of recorded operators and launches."""
        return len(self._work)

    def capture_begin(self, pool: PoolId | None = None, **_: Any) -> None:
        """Record from here on; ``pool`` is shared with the graphs that may reuse its memory."""
        if _capturing is not None:
            raise CaptureError("a graph is being captured already")
        self._pool = pool or graph_pool_handle()
        self._recorder = _Recorder(self)
        self._recorder.__enter__()
        _set_capturing(self)

    def capture_end(self) -> None:
        self._stop()
        _pools.setdefault(self.pool(), []).append(self)

    def pool(self) -> PoolId:
        """The pool that holds the memory allocated under capture."""
        if self._pool is None:
            raise CaptureError("the graph was not captured")
        return self._pool

    def replay(self) -> None:
        """Run the recorded work on the tensors seen at capture."""
        if _capturing is not None:
            raise CaptureError("replay() while a graph is being captured")
        if self not in _pools.get(self.pool(), ()):
            raise CaptureError("replay() of a graph that was reset or never captured")
        self.replays += 1
        with torch.inference_mode(), _disable_current_modes():
            self._poison()
            for run in self._work:
                run()

    def reset(self) -> None:
        graphs = _pools.get(self._pool, []) if self._pool else []
        if self in graphs:
            graphs.remove(self)
        self._work.clear()
        self._private.clear()
        self._host.clear()

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            self._recorder = None
        _set_capturing(None)

    def _poison(self) -> None:
        """Overwrite what the graphs of the pool allocated: a replay may put anything there."""
        mine = {_storage(tensor) for tensor in self._private}
        for graph in _pools[self.pool()]:
            for tensor in graph._private:
                if graph is self or _storage(tensor) not in mine:
                    poison_(tensor)


_capturing: CUDAGraph | None = None
_pools: dict[PoolId, list[CUDAGraph]] = {}
_pool_ids = itertools.count(1)


def _set_capturing(graph: CUDAGraph | None) -> None:
    global _capturing
    _capturing = graph


def is_capturing() -> bool:
    """Stands for ``torch.cuda.is_current_stream_capturing``."""
    return _capturing is not None


def graph_pool_handle() -> PoolId:
    """Stands for ``torch.cuda.graph_pool_handle``."""
    return (0, next(_pool_ids))


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool: PoolId | None = None, **_: Any) -> Iterator[None]:
    """Stands for ``torch.cuda.graph``; after an error under capture nothing stays recorded."""
    cuda_graph.capture_begin(pool=pool)
    try:
        yield
    except BaseException:
        cuda_graph._stop()
        cuda_graph.reset()
        raise
    cuda_graph.capture_end()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Put the stand-in in place of torch's graphs, which end with the ``with`` block."""
    others = {*_pools}
    with contextlib.ExitStack() as patches:
        for owner, name, value in _replacements():
            patches.enter_context(mock.patch.object(owner, name, value))
        yield
    # Their launches hold whole engines.
    for pool in _pools.keys() - others:
        del _pools[pool]


def poison_(tensor: torch.Tensor) -> None:
    """Fill with NaN, or with an index that is out of every range."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif not tensor.is_complex():
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    yield torch.cuda, "CUDAGraph", CUDAGraph
    yield torch.cuda.graphs, "CUDAGraph", CUDAGraph
    yield torch.cuda, "graph", graph
    yield torch.cuda.graphs, "graph", graph
    yield torch.cuda, "graph_pool_handle", graph_pool_handle
    yield torch.cuda, "is_current_stream_capturing", is_capturing
    for owner, name in (
        (torch.Tensor, "numpy"),
        (torch.Tensor, "tolist"),
        (torch.cuda, "synchronize"),
        (torch.accelerator, "synchronize"),
    ):
        yield owner, name, _refused_under_capture(name, getattr(owner, name))
    yield torch, "from_numpy", _noted_as_host(torch.from_numpy)
    from vllm_graft.testing.interpreter import install as interpreter

    if interpreter.installed():
        from triton.runtime.interpreter import InterpretedFunction

        yield InterpretedFunction, "run", _recorded_launch(InterpretedFunction.run)


def _refused_under_capture(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _capturing is not None and not _on_host(_capturing, tensors_of(args)):
            raise CaptureError(f"{name}() waits for the device: not permitted under capture")
        return stock(*args, **kwargs)

    return refuse


def _noted_as_host(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def from_numpy(array: Any) -> torch.Tensor:
        tensor = stock(array)
        if _capturing is not None and tensor.numel():
            _capturing._host[_storage(tensor)] = tensor
        return tensor

    return from_numpy


def _on_host(graph: CUDAGraph, tensors: list[torch.Tensor]) -> bool:
    """Whether all of them, one at least, came out of NumPy arrays in this capture."""
    return bool(tensors) and all(_storage(tensor) in graph._host for tensor in tensors)


def _recorded_launch(stock: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def launch() -> None:
            # The interpreter itself computes with torch, which is no work of the region.
            with _disable_current_modes():
                stock(self, *args, grid=grid, warmup=warmup, **kwargs)

        launch()
        if _capturing is not None and not warmup:
            _capturing._work.append(launch)

    return run


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _refuse_synchronising(func, args)
        if func.namespace in _PYTHON_NAMESPACES:
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        if _on_host(self._graph, tensors_of((args, kwargs))):
            # Arithmetic of the host: on a GPU no part of the capture either.
            self._graph._host.update((_storage(out), out) for out in tensors_of(result))
            return result
        self._record(func, args, kwargs, tensors_of(result))
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, outputs: list[torch.Tensor]) -> None:
        known = {_storage(tensor) for tensor in tensors_of((args, kwargs)) if tensor.numel()}
        fresh = {
            place: output
            for place, output in enumerate(outputs)
            if output.numel() and _storage(output) not in known
        }
        self._graph._private.extend(fresh.values())
        is_view = not fresh and not func._schema.is_mutable
        if is_view or _full_name(func) in _ALLOCATING:
            return

        def run() -> None:
            results = tensors_of(func(*args, **kwargs))
            for place, output in fresh.items():
                output.copy_(results[place])

        self._graph._work.append(run)


def _full_name(func: Any) -> str:
    overload = func._schema.overload_name
    return f"{func._schema.name}.{overload}" if overload else str(func._schema.name)


def _refuse_synchronising(func: Any, args: tuple[Any, ...]) -> None:
    name = _full_name(func)
    if func._schema.name in _SYNCHRONISING or name in _SYNCHRONISING:
        raise CaptureError(f"{name} waits for the device: not permitted under capture")
    if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    ):
        raise CaptureError(f"{name} with a mask waits for the device: not permitted under capture")
