"""The CPU back end of Triton whose kernels are all interpreted."""

from typing import Any

from triton.backends import Backend, backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.backends.driver import DriverBase

from vllm_graft.base.errors import GraftError


def add() -> None:
    """Make it the back end that Triton finds."""
    backends["cpu"] = Backend(_Compiler, _Driver)


class _Compiler(BaseBackend):
    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        raise GraftError("the CPU back end of vllm_graft.testing interprets, never compiles")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        raise GraftError("the CPU back end of vllm_graft.testing interprets, never compiles")

    def load_dialects(self, context: object) -> None:
        pass

    def get_module_map(self) -> dict[str, Any]:
        return {}


class _Driver(DriverBase):
    """The one active driver; vLLM asks it for little more than that."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise GraftError("the CPU back end of vllm_graft.testing launches no compiled kernel")

    def get_current_target(self) -> Any:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        from triton.testing import do_bench

        return do_bench

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None:
        pass
