"""Leaves each autotuned kernel of vLLM's recurrent layers its smallest configuration.

Python imports this module by itself, in every process, if its folder is on ``PYTHONPATH``. Tests
do the same within one process, by the file that says which kernels and configurations these are.
"""

import importlib.util
from pathlib import Path
from typing import Any

CHOICE = Path(__file__).parents[3] / "tests" / "support" / "one_configuration.py"


def _leave_one() -> None:
    from triton.runtime import autotuner

    spec = importlib.util.spec_from_file_location("one_configuration", CHOICE)
    choice = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(choice)
    stock = autotuner.Autotuner.__init__

    def init(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, kernel, *args, **kwargs)
        while hasattr(kernel, "fn"):
            kernel = kernel.fn
        if kernel.__module__.startswith(choice.PACKAGES) and self.configs:
            self.configs = [choice.smallest(self.configs)]

    autotuner.Autotuner.__init__ = init


_leave_one()
