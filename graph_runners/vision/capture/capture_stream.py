"""The streams that captures run on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_graft.graph_runners.vision.capture.graph_backend import Beside


class CaptureStream(Beside):
    """The stream that captures run on, or fork to; the default one cannot be captured.

    One of a kind in a process and device: for each stream cuBLAS takes a workspace, and keeps it.

    Attributes:
        workspace: bytes that it took; 0 before `warm`.
    """

    def __init__(self, device: torch.device) -> None:
        self.workspace = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._warm = False

    def run(self, work: Callable[[], Any]) -> Any:
        """After what the current stream has been asked for."""
        with self._forked():
            return work()

    def join(self) -> None:
        """The current stream goes on when this one is done."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Make it the current stream, in order with the one before."""
        with self._forked():
            yield
        self.join()

    @contextmanager
    def _forked(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def warm(self) -> None:
        """Have cuBLAS take its workspace, which would else come out of the graphs' pool."""
        if self._warm:
            return
        self._warm = True
        cell = torch.zeros(16, 16, device=self._device)
        bias, out = cell[0].clone(), torch.empty_like(cell)
        before = int(torch.cuda.memory_reserved(self._device))
        with self.use():
            torch.mm(cell, cell, out=out)
            torch.addmm(bias, cell, cell, out=out)  # By way of cuBLASLt.
        self.workspace = int(torch.cuda.memory_reserved(self._device)) - before


@functools.cache
def stream_of(device: torch.device, number: int = 0) -> CaptureStream:
    """The stream of that number on a device, made once in a process."""
    return CaptureStream(device)
