"""Autotuned kernels of vLLM's recurrent layers, with one configuration each.

An autotuned kernel is compiled once per configuration before its first launch, some thirty times.
With an empty cache that takes minutes, and tests of answers gain nothing by it.
"""

import contextlib
import importlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PACKAGES = (
    "vllm.model_executor.layers.mamba.ops",
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
)

_NEVER_IMPORTED = ("vllm.third_party.flash_linear_attention.ops.kda",)
"""VLLM imports `fused_norm_gate` in its place; both register an operator of one name."""


def autotuned_kernels() -> dict[str, Any]:
    """Triton's autotuners of the packages, by module and name."""
    found = {}
    for name in _modules():
        module = importlib.import_module(name)
        for kernel, value in vars(module).items():
            if (tuner := _autotuner(value)) is not None:
                found[f"{name}.{kernel}"] = tuner
    return found


def smallest(configurations: Sequence[Any]) -> Any:
    """The configuration of the smallest tiles, fewest stages, fewest warps."""

    def size(each: Any) -> tuple[int, int, int]:
        sizes = [value for value in each.kwargs.values() if isinstance(value, int)]
        return math.prod(sizes), each.num_stages, each.num_warps

    return min(configurations, key=size)


@contextlib.contextmanager
def one_configuration() -> Iterator[dict[str, Any]]:
    """Leave each kernel its smallest configuration inside the ``with`` block."""
    tuners = autotuned_kernels()
    before = {name: tuner.configs for name, tuner in tuners.items()}
    try:
        for tuner in tuners.values():
            tuner.configs = [smallest(tuner.configs)]
        yield tuners
    finally:
        for name, tuner in tuners.items():
            tuner.configs = before[name]


def _modules() -> Iterator[str]:
    for package in PACKAGES:
        for folder in importlib.import_module(package).__path__:
            for source in sorted(Path(folder).glob("*.py")):
                name = f"{package}.{source.stem}"
                if name not in _NEVER_IMPORTED and "triton.autotune(" in source.read_text():
                    yield name


def _autotuner(kernel: object) -> Any:
    """The autotuner among a kernel's decorators; None if there is none."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    while isinstance(kernel, Heuristics):
        kernel = kernel.fn
    return kernel if isinstance(kernel, Autotuner) else None
