"""Compiles candidates in other processes, before they are timed, and says what they take."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_graft.spec_decode.kernels.listed_launch import Launch

PATIENCE = 60
"""Seconds that the result of a compilation is waited for."""

Target = tuple[str, int, int]
"""Arguments of Triton's ``GPUTarget``, such as ``("cuda", 90, 32)``."""


@dataclass(frozen=True)
class Built:
    """What came of a compilation.

    Attributes:
        kernel: its name.
        seconds: what it took.
        registers: registers of a thread.
        stack_bytes: local memory of a thread, which is where registers spill to.
        shared_bytes: shared memory of a program.
        error: what the compiler said; empty if it was compiled.
    """

    kernel: str
    seconds: float = 0.0
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str = ""

    def plain(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


class Compilers:
    """Processes that compile launches into Triton's cache on disk, each launch once.

    They never touch the GPU. Results come in any order.

    Args:
        target: what is compiled for.
        processes: how many kernels are compiled at a time.
    """

    def __init__(self, target: Target, processes: int) -> None:
        self._target, self._processes = target, processes
        self._pool = self._new_pool()
        self._started: dict[Launch, Future[Built]] = {}

    def start(self, launches: list[Launch]) -> list[Future[Built]]:
        """What will have come of launches; those that are not known yet are compiled."""
        for launch in launches:
            if launch not in self._started:
                self._started[launch] = self._submit(launch)
        return [self._started[launch] for launch in launches]

    def _submit(self, launch: Launch) -> Future[Built]:
        try:
            return self._pool.submit(build, launch)
        except BrokenProcessPool:
            # A kernel that the compiler did not survive ends all processes.
            self._pool = self._new_pool()
            return self._pool.submit(build, launch)

    def _new_pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            self._processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(self._target,),
        )

    @property
    def count(self) -> int:
        """Launches that were given to the processes."""
        return len(self._started)

    def close(self) -> None:
        """Drop what is not begun, and end the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _prepare(target: Target) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    from vllm_graft.spec_decode.startup.compiler import pretend_gpu

    pretend_gpu(target)


def build(launch: Launch) -> Built:
    """Compile a launch in this process, which pretends to have the GPU."""
    from vllm_graft.spec_decode.startup.compiler import compile_launch

    begin = time.monotonic()
    try:
        compiled = compile_launch(launch)
        registers, stack = resources(compiled.asm["cubin"])
        shared = int(compiled.metadata.shared)
    except Exception as error:  # Any error of a compiler is a line of the report.
        why = f"{type(error).__name__}: {error}"[:500]
        return Built(launch.name, time.monotonic() - begin, error=why)
    return Built(launch.name, time.monotonic() - begin, registers, stack, shared)


def outcome(future: Future[Built]) -> Built:
    """What came of a compilation; that its process ended or it takes too long is an error."""
    try:
        return future.result(timeout=PATIENCE)
    except Exception as error:  # Any error is a line of the report.
        return Built("kernel", error=f"{type(error).__name__}: {error}"[:500])


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its stack, as ``cuobjdump`` of Triton's wheel says."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [str(tool), "-res-usage", file.name], capture_output=True, text=True, timeout=60
        ).stdout
    return parse_resources(said)


def parse_resources(said: str) -> tuple[int, int]:
    """Registers and stack in the output of ``cuobjdump -res-usage``; -1 where it says nothing."""
    registers = re.search(r"REG:(\d+)", said)
    stack = re.search(r"STACK:(\d+)", said)
    return (int(registers[1]) if registers else -1, int(stack[1]) if stack else -1)
