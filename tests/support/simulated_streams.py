"""A deferred-stream simulator.

Work of a side stream runs when something waits for it: ``synchronize``, or a wait of the current
stream. A forgotten wait then reads old bytes, or NaN, every time. Work of the default stream runs
at once. Two streams that race on a GPU do not race here, one is simply late.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.cuda_graphs import tensors_of


class Stream:
    """Stands for ``torch.cuda.Stream``: a queue of work that is run when it is waited for."""

    device = torch.device("cpu")

    @property
    def cuda_stream(self) -> int:
        return id(self)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._enqueued = 0
        self._finished = 0
        self._scopes: list[Any] = []

    def synchronize(self) -> None:
        self._finish(self._enqueued)

    def query(self) -> bool:
        return self._finished == self._enqueued

    def wait_event(self, event: Event) -> None:
        """Order later work of this stream behind ``event``."""
        source, position = event._source, event._position
        if source is not None:
            self._push(lambda: source._finish(position))

    def wait_stream(self, stream: Stream) -> None:
        """Order later work of this stream behind the work that ``stream`` has now."""
        position = stream._enqueued
        self._push(lambda: stream._finish(position))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        scope = on_stream(self)
        scope.__enter__()
        self._scopes.append(scope)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._scopes.pop().__exit__(*exc)

    def _push(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._enqueued += 1
        if self is _default:
            self.synchronize()

    def _finish(self, position: int) -> None:
        while self._finished < position:
            self._finished += 1
            self._queue.popleft()()


class Event:
    """Stands for ``torch.cuda.Event``: a position in a stream's queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._source: Stream | None = None
        self._position = 0

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of what ``stream`` (the current one if None) has now."""
        self._source = stream or current_stream()
        self._position = self._source._enqueued

    def wait(self, stream: Stream | None = None) -> None:
        """Order later work of ``stream`` (the current one if None) behind this event."""
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return self._source is None or self._source._finished >= self._position

    def elapsed_time(self, end: Event) -> float:
        """Nothing: the simulator orders work and times none."""
        return 0.0

    def synchronize(self) -> None:
        if self._source is not None:
            self._source._finish(self._position)


_default = Stream()
_current = [_default]


def current_stream(*_: Any) -> Stream:
    """Stands for ``torch.cuda.current_stream``."""
    return _current[-1]


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Stands for ``torch.cuda.stream``: work in the block belongs to ``stream``."""
    if stream is None:
        yield
        return
    _current.append(stream)
    try:
        with contextlib.nullcontext() if stream is _default else _Deferring(stream):
            yield
    finally:
        _current.pop()


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Put the simulator in place of torch's streams and events.

    Work still pending at the end is dropped: code under test must have waited for it.
    """
    seen: list[Stream] = []

    def synchronize(*_: Any) -> None:
        for stream in list(seen):
            stream.synchronize()

    class SeenStream(Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            seen.append(self)

    replacements: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", SeenStream),
        (torch.cuda, "Event", Event),
        (torch, "Stream", SeenStream),
        (torch, "Event", Event),
        (torch.cuda, "stream", on_stream),
        (torch.cuda, "current_stream", current_stream),
        (torch.cuda, "default_stream", lambda *_: _default),
        (torch.cuda, "synchronize", synchronize),
        *_launches(),
    ]
    with contextlib.ExitStack() as patches:
        for owner, name, value in replacements:
            patches.enter_context(mock.patch.object(owner, name, value))
        yield


def _launches() -> Iterator[tuple[Any, str, Any]]:
    """Interpreted Triton launches are work of the current stream too."""
    from vllm_graft.testing.interpreter import install as interpreter

    if not interpreter.installed():
        return
    from triton.runtime.interpreter import InterpretedFunction

    stock = InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        def launch() -> None:
            with _disable_current_modes():
                stock(self, *args, **kwargs)

        current_stream()._push(launch)

    yield InterpretedFunction, "run", run


class _Deferring(TorchDispatchMode):
    """Puts each operator on the stream's queue; views and allocations are no device work."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in ("aten::_local_scalar_dense", "aten::item", "aten::nonzero"):
            self._stream.synchronize()
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._stream._push(_undisturbed(lambda: func(*args, **kwargs)))
            return _mutated(func, args, kwargs)
        inputs = tensors_of((args, kwargs))
        result = func(*args, **kwargs)
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        outputs = tensors_of(result)
        if not inputs or all(out.untyped_storage().data_ptr() in storages for out in outputs):
            return result
        for output in outputs:
            if output.is_floating_point():
                output.fill_(float("nan"))

        def compute() -> None:
            for output, value in zip(outputs, tensors_of(func(*args, **kwargs)), strict=True):
                output.copy_(value)

        self._stream._push(_undisturbed(compute))
        return result


def _undisturbed(work: Callable[[], Any]) -> Callable[[], None]:
    """Deferred work may run inside another stream's block, and must not be deferred again."""

    def run() -> None:
        with _disable_current_modes():
            work()

    return run


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an in-place or ``out=`` operator returns: the tensors that it writes."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    named |= kwargs
    written = [
        named[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    count = len(func._schema.returns)
    return None if count == 0 else written[0] if count == 1 else tuple(written[:count])
