"""One case for each Triton kernel, to compile it without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from unittest import mock

from vllm_graft.testing.compiling import CAPABILITIES, Compiled, compile_cases

ROOT = Path(__file__).resolve().parents[3]


def compiled(room: ModuleType, capabilities: Sequence[int] = CAPABILITIES) -> list[Compiled]:
    """Compile the cases of a module of the checkout, which the compiling process has to find."""
    with mock.patch.object(sys, "path", [*sys.path, str(ROOT)]):
        return compile_cases(room.__name__, capabilities)
