"""A GPU that this machine lacks: vLLM's CUDA platform, told what the GPU would say."""

import functools
import re
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest.mock import MagicMock

from pydantic import ByteSize, TypeAdapter, ValidationError

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.values import shown

OPTION = "--gpu"
NAMED = {
    "T4": "7.5:14GiB",
    "A10": "8.6:22GiB",
    "A100-40GB": "8.0:39GiB",
    "A100": "8.0:79GiB",
    "RTX3090": "8.6:23GiB",
    "RTX4090": "8.9:23GiB",
    "L4": "8.9:22GiB",
    "L40S": "8.9:44GiB",
    "H20": "9.0:95GiB",
    "H100": "9.0:79GiB",
    "H200": "9.0:139GiB",
    "RTX5090": "12.0:31GiB",
    "B200": "10.0:178GiB",
    "B300": "10.3:267GiB",
}
"""Capability and memory by name. The memory is what the driver reports of it, in whole GiB."""

_FORM = re.compile(r"(\d{1,2})\.(\d):(.+)")
_EXTENSIONS = (
    "_C_stable_libtorch",
    "_moe_C_stable_libtorch",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""Compiled modules that vLLM looks for on a GPU. A build for CPUs has none of them."""

_COMPILED = ("_C", "_moe_C", "_vllm_fa")
"""How the names of their operators' namespaces begin."""

_QUESTIONS = ("supported", "supports")
"""What is in the names of functions that ask a compiled module what a GPU can do."""


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU: its compute `capability`, such as ``(9, 0)``, and `num_bytes` of memory."""

    capability: tuple[int, int]
    num_bytes: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``H100`` or ``9.0:80GiB``. Raises `ConfigError` if the text has another form."""
        found = _FORM.fullmatch(NAMED.get(text.upper(), text))
        try:
            size = int(TypeAdapter(ByteSize).validate_python(found[3] if found else ""))
        except ValidationError:
            size = 0
        if found is None or size < 1:
            raise ConfigError(
                f"{OPTION}: {shown(text)} is no GPU that is known here ({', '.join(NAMED)}): give "
                f"its compute capability and memory, as in {OPTION} 9.0:80GiB."
            )
        return cls((int(found[1]), int(found[2])), size)

    def __str__(self) -> str:
        major, minor = self.capability
        return f"a GPU of compute capability {major}.{minor} with {self.num_bytes / 2**30:g} GiB"


def pretend(gpu: Gpu) -> None:
    """Make this GPU vLLM's platform for the rest of this process, which must run nothing on it.
    Raises `ConfigError` if vLLM has chosen a platform in this process already."""
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None and vars(platforms)["_current_platform"] is not None:
        raise ConfigError(
            f"{OPTION} comes too late: this process has imported vLLM already. Run `vllm-graft "
            "plan` as a command."
        )
    import vllm.platforms

    vllm.platforms._current_platform = _platform(gpu)
    import vllm.config.vllm

    # vLLM looks for a driver, which is missing here, and would choose Model Runner V1.
    vllm.config.vllm.HAS_TRITON = True
    _answer_for_extensions()
    _stand_in_for_kernels()


def _platform(gpu: Gpu) -> Any:
    _stand_in_for_extensions()
    import vllm.platforms.cuda
    from vllm.platforms.interface import DeviceCapability

    class PlannedGpu(vllm.platforms.cuda.CudaPlatformBase):
        """Answers what vLLM asks while it builds a configuration."""

        is_planned = True
        """Engines run on another machine than this one, whose memory says nothing about theirs."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return str(gpu)

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return gpu.num_bytes

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return 1024  # As many as the flags ask for.

    return PlannedGpu()


def _stand_in_for_extensions() -> None:
    """Put empty modules, which nobody is to call, in the places of those that can't be loaded."""
    import vllm

    for path in _EXTENSIONS:
        folder, _, leaf = path.rpartition(".")
        where = Path(str(vllm.__file__)).parent / folder
        # Not by its full name, as its package may not be importable without it.
        sys.modules[f"vllm.{path}"] = _loaded(leaf, where) or ModuleType(f"vllm.{path}")


def _loaded(name: str, folder: Path) -> ModuleType | None:
    spec = PathFinder.find_spec(name, [str(folder)])
    if spec is None or spec.loader is None:
        return None
    try:
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:
        return None  # It needs a library of the GPU's driver.
    return module


def _answer_for_extensions() -> None:
    """Answer yes where the classes of models ask, when imported, what compiled code can do."""
    import vllm._custom_ops as operations

    for name, function in [*vars(operations).items()]:
        if name.startswith("cutlass") and any(each in name for each in _QUESTIONS):
            setattr(operations, name, functools.wraps(function)(lambda *_: True))


def _stand_in_for_kernels() -> None:
    """Let the modules of models be imported, and models be built, where nothing can run. They take
    operators and streams by name, and decorate kernels, but call none of them."""
    import torch
    from vllm.triton_utils import triton

    if torch.cuda.is_available():
        return
    namespace = torch._ops._OpNamespace
    original = namespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if not self.name.startswith(_COMPILED) or name.startswith("__"):
                raise
            return MagicMock()

    namespace.__getattr__ = operator
    for name in ("Stream", "Event", "current_stream", "current_device", "_lazy_init"):
        setattr(torch.cuda, name, MagicMock(return_value=0))
    if not hasattr(triton, "backends"):
        triton.Config = MagicMock()  # vLLM's stand-in for Triton gives a function.
    if find_spec("cuda") is None:
        sys.modules["cuda"] = MagicMock()
