"""Leaves each autotuned kernel of vLLM's recurrent layers its smallest configuration.

Python imports this module by itself, in every process, if its folder is on ``PYTHONPATH``. Tests
do the same within one process: `tests/support/one_configuration.py`.
"""

import math
from typing import Any

PACKAGES = (
    "vllm.model_executor.layers.mamba.ops",
    "vllm.third_party.flash_linear_attention.ops",
    "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
)


def _size(configuration: Any) -> tuple[int, int, int]:
    sizes = [value for value in configuration.kwargs.values() if isinstance(value, int)]
    return math.prod(sizes), configuration.num_stages, configuration.num_warps


def _leave_one() -> None:
    from triton.runtime import autotuner

    stock = autotuner.Autotuner.__init__

    def init(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, kernel, *args, **kwargs)
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        if kernel.__module__.startswith(PACKAGES) and self.configs:
            self.configs = [min(self.configs, key=_size)]

    autotuner.Autotuner.__init__ = init


_leave_one()
