"""A back end for tests, which stands for CUDA graphs on any device."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.capture.graph_backend import Captured, GraphBackend, Region


def _bytes_of(output: Any) -> int:
    leaves = pytree.tree_leaves(output)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


class _Closure(Captured):
    def __init__(self, backend: FakeBackend, region: Region) -> None:
        self._backend = backend
        self._region: Region | None = region
        with torch.inference_mode():
            self.output = pytree.tree_map_only(torch.Tensor, torch.clone, region())

    def replay(self) -> None:
        if self._region is None:
            raise GraftError("replay() of a region that was reset")
        self._backend.overwrite(self)
        with torch.inference_mode():
            anew = pytree.tree_leaves(self._region())
            for old, new in zip(pytree.tree_leaves(self.output), anew, strict=True):
                old.copy_(new)

    def reset(self) -> None:
        self._region = None


class FakeBackend(GraphBackend):
    """Replays a region by running its Python again on the tensors that it holds.

    A graph on a GPU freezes the addresses and host numbers that it was captured with. A region that
    keeps them in static buffers behaves alike here, so stale metadata, swapped tensors and wrong
    padding show on a CPU. An output is poisoned as soon as another region runs, as that region may
    write there on a GPU.

    Attributes:
        opened: whether a pool is open.
        held: bytes that `hold` has taken.
        captures: number of captures so far.
    """

    reads_device = True
    pools_static = False
    reserved_static = 0
    overhead = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.opened = False
        self.held = 0
        self.captures = 0
        self._bytes = 0
        self._latest: _Closure | None = None

    def open(self, pool: Any) -> None:
        self.opened = True

    def close(self) -> None:
        self.opened, self.held, self._bytes = False, 0, 0
        self._latest = None

    def capture(self, region: Region) -> Captured:
        captured = _Closure(self, region)
        self.overwrite(captured)
        self.captures += 1
        self._bytes = max(self._bytes, _bytes_of(captured.output))
        return captured

    def overwrite(self, now: _Closure) -> None:
        """Poison the output of the region that ran before `now`."""
        latest, self._latest = self._latest, now
        if latest is None or latest is now:
            return
        with torch.inference_mode():
            for leaf in pytree.tree_leaves(latest.output):
                leaf.fill_(math.nan if leaf.is_floating_point() else -1)

    def reserved(self) -> int:
        """Bytes of the largest output since `open`, as all outputs share one place."""
        return self._bytes

    def peak(self, region: Region) -> tuple[Any, int]:
        """The result, and its own bytes for a peak."""
        result = region()
        return result, _bytes_of(result)

    def hold(self, num_bytes: int) -> bool:
        self.held = num_bytes
        return True

    def release(self) -> None:
        self.held = 0

    def side_stream(self, room: int) -> None:
        return None

    def host_block(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def stream(self) -> Any:
        return contextlib.nullcontext()

    static = stream

    def timed(self, region: Region) -> tuple[Any, float]:
        """The result and no time: a time measured here would say nothing about graphs."""
        return region(), 0.0
