"""One case for each Triton kernel, to compile it without a GPU."""

import ast
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


def launched_kernels(package: ModuleType) -> set[str]:
    """Jitted ``*_kernel`` functions of a package and what is below it, named as in `KernelCase`."""
    root = Path(package.__path__[0])
    return {
        f"{'.'.join((package.__name__, *file.relative_to(root).with_suffix('').parts))}:{node.name}"
        for file in root.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
