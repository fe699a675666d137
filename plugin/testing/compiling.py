"""Compile-only check of Triton kernels on a machine without GPU.

The interpreter accepts what the compiler does not, as a type that changes in a loop. The compiler
runs up to the cubin, in a child process: a process either interprets or compiles.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from vllm_graft.base.errors import GraftError

CAPABILITIES = (80, 90, 100)


@dataclass(frozen=True)
class KernelCase:
    """One specialisation of a kernel.

    Attributes:
        function: Where the kernel is, as ``"package.module:function"``.
        signature: Type of each argument that is no constexpr, as ``"*bf16"`` or ``"i32"``.
        constexprs: Value of each constexpr; also ``None`` for a pointer that is not given.
        options: Such as ``{"num_warps": 4}``.
    """

    name: str
    function: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def argument_types(types: Mapping[str, str]) -> dict[str, str]:
    """Argument types of a `KernelCase`, from ``{"*i64": "tokens parents"}``."""
    return {name: kind for kind, names in types.items() for name in names.split()}


@dataclass(frozen=True)
class Compiled:
    """Outcome of one case on one architecture: 90 is sm_90; the compiler's error, or None."""

    name: str
    capability: int
    shared_bytes: int
    error: str | None


def compile_cases(
    cases: str | Path, capabilities: Sequence[int] = CAPABILITIES, timeout: float = 600
) -> list[Compiled]:
    """Compile every case of the list ``CASES`` of a module, for every architecture.

    Args:
        cases: A dotted module name, or the path of a Python file.
        timeout: Seconds for all of it.

    Raises:
        GraftError: The module or a kernel cannot be imported without the interpreter.
    """
    hidden = ("TRITON_INTERPRET", "VLLM_GRAFT_INTERPRET")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    child = subprocess.run(
        [sys.executable, "-m", __name__, str(cases), *map(str, capabilities)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout,
    )
    if child.returncode:
        raise GraftError(f"the kernels of {cases} could not be compiled:\n{child.stderr[-4000:]}")
    return [Compiled(**json.loads(line)) for line in child.stdout.splitlines()]


def main(arguments: Sequence[str]) -> int:
    """In the child: print a line of JSON for each case and architecture."""
    for case in _load(arguments[0]).CASES:
        for capability in arguments[1:]:
            print(json.dumps(vars(_compile(case, int(capability)))), flush=True)
    return 0


def _load(cases: str) -> ModuleType:
    if not cases.endswith(".py"):
        return importlib.import_module(cases)
    name = Path(cases).stem
    spec = importlib.util.spec_from_file_location(name, cases)
    if spec is None or spec.loader is None:
        raise GraftError(f"{cases} is no Python file")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(case: KernelCase, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = pkgutil.resolve_name(case.function)
    while not isinstance(kernel, triton.JITFunction):
        kernel = kernel.fn
    signature = {**case.signature, **dict.fromkeys(case.constexprs, "constexpr")}
    ordered = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=ordered, constexprs=dict(case.constexprs))
    try:
        built = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options=dict(case.options)
        )
    except Exception as error:
        return Compiled(case.name, capability, 0, f"{type(error).__name__}: {error}")
    return Compiled(case.name, capability, built.metadata.shared, None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
