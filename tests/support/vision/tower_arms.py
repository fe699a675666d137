"""The ways to run a tower: eagerly, in vLLM's encoder graphs, and in ours."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.vision.random_towers import Limits, vllm_config
from tests.support.vision.towers import prewarm


@dataclass
class Machine:
    """The device and settings with which towers run."""

    device: str
    dtype: Any
    limits: Limits
    graft: dict[str, Any] = field(default_factory=dict)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()


class Arm:
    """One way to run a model's encoder: eagerly, or through a manager with captured graphs."""

    def __init__(self, model: Any, machine: Machine, manager: Any = None) -> None:
        self.manager = manager
        self.eager_calls = 0
        self._model = model
        self._machine = machine

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Return embeddings, one tensor per item; the device may still be at work on them."""
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
        self._machine.synchronize()
        return outputs

    def prewarm(self, inputs: Mapping[str, Any]) -> None:
        """Bring our manager, which captures on demand, to the state after many such inputs."""
        prewarm(self.manager, dict(inputs))
        self._machine.synchronize()


def make(kind: str, model: Any, machine: Machine) -> Arm:
    """Make an arm with a manager: ``ours`` or ``stock``; ``+compile`` for a compiled tower."""
    base = kind.partition("+")[0]
    graft = {"vit": machine.graft} if base == "ours" else None
    config = vllm_config(machine.limits, graft, "+compile" in kind, machine.dtype)
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner

    manager_class = ViTCudaGraphRunner if base == "ours" else EncoderCudaGraphManager
    with set_current_vllm_config(config), torch.inference_mode(), _capturing(machine.device):
        manager = manager_class(config, torch.device(machine.device), machine.dtype, model)
        manager.capture(graph_pool=_pool(machine.device))
        machine.synchronize()
    return Arm(model, machine, manager)


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
