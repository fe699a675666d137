"""A pretended back end: it shows on a CPU what goes wrong with stale metadata or shared buffers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils import _pytree as pytree

from vllm_graft.base.errors import GraftError
from vllm_graft.graph_runners.vision.capture.graph_backend import Captured, GraphBackend, Region
from vllm_graft.graph_runners.vision.capture.tensor_cache import num_bytes


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
    """Runs the region's Python again, on the tensors that it holds.

    What a graph freezes on a GPU, addresses and host numbers that were captured, is frozen here as
    well if the region keeps them in static buffers. So stale metadata, swapped tensors and wrong
    padding show on a CPU. An output is poisoned as soon as another region runs, which may write
    there on a GPU. The bytes that it reports are those of the largest output.
    """

    reads_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.opened = False
        self.held = 0
        self.captures = 0
        self._bytes = 0
        self._latest: _Closure | None = None

    def open(self, pool: Any) -> None:
        """Nothing to take."""
        self.opened = True

    def close(self) -> None:
        """Nothing to give back."""
        self.opened, self.held, self._bytes = False, 0, 0
        self._latest = None

    def capture(self, region: Region) -> Captured:
        """Run it once."""
        captured = _Closure(self, region)
        self.overwrite(captured)
        self.captures += 1
        self._bytes = max(self._bytes, num_bytes(captured.output))
        return captured

    def overwrite(self, now: _Closure) -> None:
        """Poison what ran before `now` has left."""
        latest, self._latest = self._latest, now
        if latest is None or latest is now:
            return
        with torch.inference_mode():
            for leaf in pytree.tree_leaves(latest.output):
                leaf.fill_(math.nan if leaf.is_floating_point() else -1)

    def reserved(self) -> int:
        """Bytes of the largest output since `open`: the next one takes its place."""
        return self._bytes

    def peak(self, region: Region) -> tuple[Any, int]:
        """Of the result alone."""
        result = region()
        return result, num_bytes(result)

    def hold(self, num_bytes: int) -> bool:
        """Always there."""
        self.held = num_bytes
        return True

    def release(self) -> None:
        """Nothing is held."""
        self.held = 0

    def synchronize(self) -> None:
        """Nothing runs beside us."""

    def timed(self, region: Region) -> tuple[Any, float]:
        """Takes no time: what would be measured here says nothing of graphs."""
        return region(), 0.0
