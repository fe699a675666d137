"""Compile-only check of Triton kernels on a machine without GPU, as their launches in real calls.

The interpreter accepts what the compiler does not, as a type that changes in a loop. Calls run over
tensors of the device ``meta``, and launch nothing. The compiler runs up to the cubin, in a child
process: a process either interprets or compiles.
"""

from __future__ import annotations

import ast
import copyreg
import importlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import triton.language as tl

from vllm_graft.base.errors import GraftError
from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, Launch, listing
from vllm_graft.spec_decode.startup.ahead import compiling_environment
from vllm_graft.spec_decode.startup.compiler import compile_launch, pretend_gpu

# The interpreter leaves attributes in Triton's types that no other process can read.
copyreg.pickle(tl.dtype, lambda dtype: (tl.dtype, (dtype.name,)))


class Compiled(NamedTuple):
    """Outcome of a launch: bytes of shared memory, and the compiler's error or an empty text."""

    shared_bytes: int
    error: str


def kernels_of(package: ModuleType) -> set[str]:
    """Jitted ``*_kernel`` functions of a package and what is below it, as ``"module:function"``."""
    root = Path(package.__path__[0])
    return {
        f"{'.'.join((package.__name__, *file.relative_to(root).with_suffix('').parts))}:{node.name}"
        for file in root.rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def launches_in(package: ModuleType, calls: Iterable[Callable[[], object]]) -> list[Launch]:
    """The different launches of a package's kernels in some calls.

    Calls are made as in a build of torch for NVIDIA GPUs. Kernels are launched by their names in
    their own modules.
    """
    found: dict[Launch, None] = {}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.version, "cuda", "13.0"))
        for name in kernels_of(package):
            module, _, kernel = name.partition(":")
            home = importlib.import_module(module)
            if not isinstance(stock := getattr(home, kernel), Kernel):
                stack.enter_context(mock.patch.object(home, kernel, Kernel(stock)))
        stack.enter_context(listing(lambda launch: found.setdefault(launch)))
        for call in calls:
            call()
    return list(found)


def compiled(launches: Sequence[Launch], capability: int, timeout: float = 600) -> list[Compiled]:
    """Compile launches for an architecture: 90 is sm_90; all of it within ``timeout`` seconds.

    Raises:
        GraftError: A kernel cannot be imported without the interpreter.
    """
    child = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(capability)],
        env=compiling_environment(),
        input=pickle.dumps(launches),
        capture_output=True,
        timeout=timeout,
    )
    if child.returncode:
        raise GraftError(f"no kernel could be compiled:\n{child.stderr.decode()[-4000:]}")
    return [Compiled(*json.loads(line)) for line in child.stdout.splitlines()]


def main(capability: int) -> int:
    """In the child: compile pickled launches of standard input, and print a line of JSON each."""
    launches = pickle.load(sys.stdin.buffer)
    pretend_gpu(("cuda", capability, 32))
    for launch in launches:
        try:
            outcome = Compiled(compile_launch(launch).metadata.shared, "")
        except Exception as error:
            outcome = Compiled(0, f"{type(error).__name__}: {error}")
        print(json.dumps(outcome), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
