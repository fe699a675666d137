"""Triton's interpreter as the CPU back end of vLLM.

vLLM's Model Runner V2 runs on a CPU when ``vllm.triton_utils.HAS_TRITON`` is true, which asks for
an entry ``cpu`` in ``triton.backends.backends``. The Triton of PyPI has none. :func:`install` adds
one that compiles nothing, switches the interpreter on, and mends the interpreter's known defects
(modules ``interpreter_numerics``, ``interpreter_syntax``, ``interpreter_launch``).
"""

from __future__ import annotations

import os
import sys
from typing import Any

from vllm_graft.errors import GraftError


class InterpreterTooLateError(GraftError):
    """Triton or vLLM was imported before the interpreter was switched on."""


def installed() -> bool:
    """Whether :func:`install` has run in this process."""
    backends = sys.modules.get("triton.backends")
    return backends is not None and "cpu" in backends.backends


def install() -> None:
    """Switch the interpreter on for this process; a second call does nothing.

    Must run before anything imports Triton: a kernel becomes interpreted or compiled when it is
    decorated, and Triton decorates its own ``tl.sum`` and others at import.

    Raises:
        InterpreterTooLateError: Triton's kernels are compiled ones already, or vLLM has already
            decided that there is no Triton.
    """
    if installed():
        return
    _refuse_if_late()
    os.environ["TRITON_INTERPRET"] = "1"
    _add_backend()
    from vllm_graft.testing import interpreter_launch, interpreter_numerics, interpreter_syntax

    interpreter_syntax.mend()
    interpreter_numerics.mend()
    interpreter_launch.mend()


def _refuse_if_late() -> None:
    standard = sys.modules.get("triton.language.standard")
    if standard is not None and type(standard.sum).__name__ == "JITFunction":
        raise InterpreterTooLateError(
            "triton was imported before vllm_graft.testing.install(), so its kernels are compiled "
            "ones. Call install() first (in conftest.py, at module level), or set "
            "TRITON_INTERPRET=1 in the environment of the process."
        )
    importing = sys.modules.get("vllm.triton_utils.importing")
    if importing is not None and not importing.HAS_TRITON:
        raise InterpreterTooLateError(
            "vllm was imported before vllm_graft.testing.install() and has found no CPU back end "
            "of Triton (HAS_TRITON is False). Call install() before anything imports vllm."
        )


def _add_backend() -> None:
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend, GPUTarget
    from triton.backends.driver import DriverBase

    class InterpreterCompiler(BaseBackend):
        """Compiles nothing: every kernel is interpreted."""

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

    class InterpreterDriver(DriverBase):
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

    backends["cpu"] = Backend(InterpreterCompiler, InterpreterDriver)
