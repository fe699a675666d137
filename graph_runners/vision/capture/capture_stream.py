"""The CUDA streams that captures run on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.graph_backend import SideStream


class CaptureStream(SideStream):
    """A stream that captures run on or fork to; the default stream cannot be captured.

    Use :func:`stream_of` to get one: cuBLAS takes a workspace for each stream and keeps it, so a
    process should make few.

    Attributes:
        workspace: bytes of cuBLAS's workspace; 0 before `warm`.
    """

    def __init__(self, device: torch.device) -> None:
        self.workspace = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._warm = False

    def run(self, work: Callable[[], Any]) -> Any:
        """Run `work` on this stream, after the work of the current stream."""
        with self._forked():
            return work()

    def join(self) -> None:
        """Let the current stream wait for this one."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make this the current stream; work before and after the body stays in order."""
        with self._forked():
            yield
        self.join()

    @contextmanager
    def _forked(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def warm(self) -> None:
        """Let cuBLAS take its workspace now, as a capture would take it from the graphs' pool."""
        if self._warm:
            return
        self._warm = True
        cell = torch.zeros(16, 16, device=self._device)
        bias, out = cell[0].clone(), torch.empty_like(cell)
        before = int(torch.cuda.memory_reserved(self._device))
        with self.use():
            torch.mm(cell, cell, out=out)
            torch.addmm(bias, cell, cell, out=out)  # Goes through cuBLASLt.
        self.workspace = int(torch.cuda.memory_reserved(self._device)) - before


@functools.cache
def stream_of(device: torch.device, number: int = 0) -> CaptureStream:
    """The stream of this number on a device; it is made once per process."""
    return CaptureStream(device)
