"""A process that compiles kernels for a GPU which it never touches.

A worker starts it with ``python -m``, writes a `Job` to its standard input, and reads one line of
JSON per kernel from its standard output. Kernels go to Triton's cache on disk, where the worker's
own launches find them.

The process imports torch and Triton once and compiles one small kernel itself, so that all that
Triton reads at its first compilation is read. Then it forks a child per kernel: a kernel that the
compiler does not survive costs no other. It never has threads or a CUDA context, so that forks are
safe. Linux ends it together with the worker, and its children together with it."""

import contextlib
import ctypes
import json
import os
import pickle
import pkgutil
import signal
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm_graft.base.values import reason_of
from vllm_graft.spec_decode.kernels.kernel_launch import ALIGNMENT, Kernel, Launch, Pointer

_PR_SET_PDEATHSIG = 1
"""Linux's ``prctl`` that sets the signal which this process gets when its parent ends."""

_NICENESS = 10
"""The worker loads weights meanwhile, and goes first where there are too few cores for all."""


@dataclass(frozen=True)
class Job:
    """Specialisations to compile, the longest first, so many at a time, for a Triton ``GPUTarget``
    such as ``("cuda", 90, 32)``."""

    target: tuple[str, int, int]
    launches: tuple[Launch, ...]
    processes: int


class Outcome(NamedTuple):
    """The outcome of a kernel after so many seconds; `error` is empty if it was compiled."""

    name: str
    seconds: float
    error: str = ""


class _Address:
    """Stands for a tensor where Triton looks at its dtype and its address."""

    def __init__(self, pointer: Pointer) -> None:
        import torch

        self.dtype = getattr(torch, pointer.dtype)
        self._address = 0 if pointer.aligned else ALIGNMENT // 2

    def data_ptr(self) -> int:
        return self._address

    @staticmethod
    def ptr_range() -> int:
        return 0  # as Triton's own stand-in for a tensor says


def pretend_gpu(target: tuple[str, int, int]) -> None:
    """Let this process compile for a GPU that it does not have."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # Compiling asks no more than this of a driver.
    absent: Any = SimpleNamespace(
        get_current_target=lambda: GPUTarget(*target),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
    )
    driver.set_active(absent)


def compile_launch(launch: Launch) -> Any:
    """Compile one specialisation into Triton's cache on disk, and return Triton's kernel. Whatever
    the compiler raises is raised."""
    found = pkgutil.resolve_name(launch.kernel)
    kernel = found.fn if isinstance(found, Kernel) else found
    arguments = {
        name: _Address(value) if isinstance(value, Pointer) else value
        for name, value in launch.arguments
    }
    return kernel.warmup(grid=(1,), **arguments, **dict(launch.options))


def compile_all(job: Job, results: int) -> None:
    """Compile a job's kernels, and write a line per kernel to a descriptor. The last kernel, the
    one that takes least, is compiled first, by this process."""
    pretend_gpu(job.target)
    waiting = list(reversed(job.launches))
    running: dict[int, tuple[Launch, float]] = {}
    if waiting:
        _compile_one(waiting.pop(0), results)
    while waiting or running:
        while waiting and len(running) < job.processes:
            launch = waiting.pop()
            running[_forked(launch, results)] = launch, time.monotonic()
        child, status = os.wait()
        launch, began = running.pop(child)
        if status:
            why = f"the compiler's process ended with status {os.waitstatus_to_exitcode(status)}"
            _write(results, Outcome(launch.name, time.monotonic() - began, why))


def _forked(launch: Launch, results: int) -> int:
    """The id of a child that compiles a kernel, says what came of it and ends."""
    here = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        end_with(here)
        _compile_one(launch, results)
        status = 0
    finally:
        os._exit(status)


def _compile_one(launch: Launch, results: int) -> None:
    began, error = time.monotonic(), ""
    try:
        compile_launch(launch)
    except Exception as problem:
        error = reason_of(problem)[:1000]
    _write(results, Outcome(launch.name, time.monotonic() - began, error))


def _write(results: int, outcome: Outcome) -> None:
    # One write of less than a pipe's 4,096 bytes is not mixed with others.
    os.write(results, (json.dumps(outcome) + "\n").encode())


def end_with(parent: int) -> None:
    """Let this process be killed as soon as its parent has ended, however it ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It has ended before the call.
        os._exit(1)


def main(parent: int) -> int:
    """Read a `Job` from standard input and compile it."""
    end_with(parent)
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    # What libraries print must not come between the results.
    results = os.dup(1)
    os.dup2(2, 1)
    job = pickle.load(sys.stdin.buffer)
    compile_all(job, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
