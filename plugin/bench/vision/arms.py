"""The ways to run a tower that are compared."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.vision.random_towers import Limits, vllm_config

ARMS = ("eager", "stock", "ours", "stock+compile", "ours+compile", "eager+compile")
RUNNER = "vllm_graft.graph_runners.vision.runner:ViTCudaGraphRunner"


_HIDDEN_CYCLES = 1_000_000
"""Cycles of the device's clock: about half a millisecond."""


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


@dataclass
class Machine:
    """The device and settings with which towers run.

    Attributes:
        device: ``cuda`` or ``cpu``.
        dtype: type of weights and pixels.
        limits: settings that managers take from the engine's configuration.
        graft: the configuration under ``graft.vit``.
        runner: our manager, as ``"module:attribute"``.
    """

    device: str
    dtype: Any
    limits: Limits
    graft: dict[str, Any] = field(default_factory=dict)
    runner: str = RUNNER

    @property
    def synchronize(self) -> Callable[[], None]:
        """Wait for the device."""
        return lambda: synchronize(self.device)

    def memory(self) -> int:
        """Return the bytes that the allocator holds after its caches are freed; 0 on a CPU."""
        if self.device == "cpu":
            return 0
        import torch

        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return int(torch.cuda.memory_reserved())

    def shared(self) -> int:
        """Bytes that our runners keep in this process once one was made."""
        if self.device == "cpu":
            return 0
        import torch

        from vllm_graft.graph_runners.vision.capture.cuda_backend import CudaBackend

        return CudaBackend(torch.device(self.device)).overhead


class Arm:
    """One way to run a model's encoder: eagerly, or through a manager with captured graphs.

    Attributes:
        name: one of :data:`ARMS`.
        manager: None where everything is run eagerly.
        eager_calls: calls that the manager left to the model.
    """

    def __init__(self, name: str, model: Any, machine: Machine, manager: Any = None) -> None:
        self.name = name
        self.manager = manager
        self.eager_calls = 0
        self._model = model
        self._machine = machine

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return embeddings, one tensor per item; the device may still be at work on them.

        This is what ``EncoderRunner.execute_mm_encoder`` does with one batch.
        """
        import torch

        with torch.inference_mode():
            outputs = self.manager.execute(dict(inputs)) if self.manager is not None else None
            if outputs is None:
                self.eager_calls += 1
                outputs = self._model.embed_multimodal(**inputs)
        return list(outputs)

    def finished(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return embeddings, after waiting for the device."""
        outputs = self(inputs)
        synchronize(self._machine.device)
        return outputs

    def host_seconds(self, inputs: Mapping[str, Any]) -> float:
        """Measure seconds until a call on an idle device returns, with the device still at work."""
        synchronize(self._machine.device)
        start = time.perf_counter()
        self(inputs)
        seconds = time.perf_counter() - start
        synchronize(self._machine.device)
        return seconds

    def replay_seconds(self, inputs: Mapping[str, Any]) -> float | None:
        """Measure the device's seconds in all graph replays of a call; None where there was none.

        Events are recorded right before and after each replay, behind work that hides its launch.
        """
        if self._machine.device == "cpu":
            return None
        import torch

        replay, events = torch.cuda.CUDAGraph.replay, []

        def timed(graph: Any) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_HIDDEN_CYCLES)
            start.record()
            replay(graph)
            end.record()
            events.append((start, end))

        synchronize(self._machine.device)
        with mock.patch.object(torch.cuda.CUDAGraph, "replay", timed):
            self.finished(inputs)
        return sum(start.elapsed_time(end) for start, end in events) / 1e3 if events else None

    def statistics(self) -> dict[str, Any]:
        """The manager's counters, as it reports them."""
        for name in ("report", "get_cumulative_stats"):
            counters = getattr(self.manager, name, None)
            if callable(counters):
                return dict(counters())
        return {}

    def prewarm(self, inputs: Mapping[str, Any]) -> None:
        """Bring a manager that captures on demand to the state after many such inputs."""
        if hasattr(self.manager, "prewarm"):
            self.manager.prewarm(dict(inputs))
            synchronize(self._machine.device)


def make(kind: str, model: Any, machine: Machine, limits: Limits | None = None) -> Arm:
    """Make an arm in its cold state; managers, ours and stock's, are built and captured.

    Raises:
        BenchmarkError: our manager cannot be loaded.
    """
    base = kind.partition("+")[0]
    if base == "eager":
        return Arm(kind, model, machine)
    graft = {"vit": machine.graft} if base == "ours" else None
    config = vllm_config(limits or machine.limits, graft, "+compile" in kind, machine.dtype)
    import torch
    from vllm.config import set_current_vllm_config

    manager_class = ours(machine.runner) if base == "ours" else _stock()
    with set_current_vllm_config(config), torch.inference_mode(), _capturing(machine.device):
        manager = manager_class(config, torch.device(machine.device), machine.dtype, model)
        manager.capture(graph_pool=_pool(machine.device))
        synchronize(machine.device)
    return Arm(kind, model, machine, manager)


def ours(runner: str) -> Any:
    """Import our manager's class.

    Raises:
        BenchmarkError: it cannot be imported.
    """
    from vllm_graft.base.errors import HookError
    from vllm_graft.hooks.entries import VitGraphRunner

    try:
        return VitGraphRunner("ours", runner, "the one that is measured").resolve()
    except HookError as error:
        raise BenchmarkError(f"--runner {runner}: {error}") from error


def _stock() -> Any:
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    return EncoderCudaGraphManager


def _pool(device: str) -> Any:
    import torch

    if device == "cpu":
        return torch.cuda.graph_pool_handle()
    from vllm.platforms import current_platform

    return current_platform.graph_pool_handle()


@contextlib.contextmanager
def _capturing(device: str) -> Iterator[None]:
    """Return the context that the engine puts around ``capture``."""
    if device == "cpu":
        yield
        return
    import torch
    from vllm.distributed.parallel_state import graph_capture

    with graph_capture(device=torch.device(device)):
        yield
