"""The worker's side of compiling ahead: a process compiles while the model loads."""

import contextlib
import hashlib
import io
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_graft.base.locks import try_lock
from vllm_graft.base.log import logger, warning_once
from vllm_graft.spec_decode.kernels.kernel_launch import Launch
from vllm_graft.spec_decode.startup.compiler import Job, Outcome

MAX_PROCESSES = 16
"""A child of the compiling process takes about 100 MiB of host memory, what it shares left out."""

PATIENCE_SECONDS = 60.0
"""Wait of the worker for the next kernel. None takes as long, so then something hangs."""

_SLOW = ("split_kernel", "latent_kernel", "own_rows_kernel")
"""Kernels that take seconds each. They go first, so that none of them is waited for at the end."""


@dataclass
class Ahead:
    """Kernels that are compiled ahead, and what came of them: how many the start will need, as far
    as was `foretold`; those that `failed`, with the compiler's words; seconds to the last kernel,
    and of these those in which the worker `waited`; and `why` none were, empty if they were."""

    foretold: int = 0
    compiled: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    waited: float = 0.0
    why: str = ""
    _running: "_Running | None" = None

    def finish(self) -> None:
        """Wait until the last kernel is compiled, and end the process; again does nothing. Kernels
        that are not compiled after all are compiled where they are first launched."""
        running, self._running = self._running, None
        if running is None:
            return
        began = time.monotonic()
        with contextlib.closing(running):
            for outcome in running.outcomes():
                if outcome.error:
                    self.failed.setdefault(outcome.name, outcome.error)
                else:
                    self.compiled += 1
            now = time.monotonic()
            self.waited, self.seconds = now - began, now - running.began
            words = running.last_words()
        if self.compiled == self.foretold:
            running.done.touch()
        elif self.failed or words:
            name, why = next(iter(self.failed.items()), ("the process", words))
            warning_once(
                f"vllm-graft compiled {self.compiled} of {self.foretold} kernels ahead; {name}: "
                f"{why}. What is missing is compiled where it is first used"
            )
        logger.info(
            f"vllm-graft compiled {self.compiled} kernels in {self.seconds:.1f} s while the model "
            f"was loading, and waited for them for {self.waited:.1f} s"
        )

    def report(self) -> dict[str, Any]:
        told = {name: value for name, value in vars(self).items() if name != "_running"}
        return told | {name: round(told[name], 2) for name in ("seconds", "waited")}


class _Running:
    """The process that compiles. It ends with this object, and with the worker's process. The file
    `done` says that all is compiled; the descriptor `lock` keeps other workers off."""

    def __init__(self, job: Job, done: Path, lock: int) -> None:
        self.began, self.done = time.monotonic(), done
        self._errors = io.FileIO(os.memfd_create("compiler-errors"), "r+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _COMPILER, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=compiling_environment(),
            start_new_session=True,
        )
        self._finalizer = weakref.finalize(self, _end, self._process, self._errors, lock)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(pickle.dumps(job))

    def outcomes(self) -> Iterable[Outcome]:
        """The outcome of each kernel, until there are no more or none has come for too long."""
        assert self._process.stdout is not None
        pipe, rest = self._process.stdout.fileno(), b""
        # Not `select`, which knows no descriptors from 1024 on, as a server may have.
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        while waiting.poll(PATIENCE_SECONDS * 1000):
            found = os.read(pipe, 1 << 16)
            if not found:
                return
            *lines, rest = (rest + found).split(b"\n")
            for line in lines:
                yield Outcome(*json.loads(line))

    def last_words(self) -> str:
        """The end of what the process has said of its own failure; empty if it ended well."""
        try:
            if self._process.wait(timeout=1) == 0:
                return ""
        except subprocess.TimeoutExpired:
            return f"nothing came of it for {PATIENCE_SECONDS:.0f} s"
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else f"ended with status {self._process.poll()}"

    def close(self) -> None:
        self._finalizer()


_COMPILER = "vllm_graft.spec_decode.startup.compiler"

_INTERPRETER = ("TRITON_INTERPRET", "VLLM_GRAFT_INTERPRET")
"""Variables by which tests interpret kernels; what is interpreted can't be compiled."""


def _end(process: subprocess.Popen[bytes], errors: io.FileIO, lock: int) -> None:
    if process.poll() is None:
        # Its children are of its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, errors):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    with contextlib.suppress(OSError):
        os.close(lock)


def compile_ahead(
    launches: Collection[Launch], target: tuple[str, int, int], processes: int | None
) -> Ahead:
    """Begin to compile so many kernels at a time, or one per core, for a Triton ``GPUTarget``.
    Triton's cache on disk stays the one that it is now: torch's compiler would name another one for
    this process as soon as it has compiled something."""
    ahead = Ahead(foretold=len(set(launches)))
    ordered = sorted(set(launches), key=lambda each: (each.name not in _SLOW, each.name))
    try:
        cache = keep_cache()
        done = cache / f"vllm-graft-{fingerprint(ordered, target)}"
        if done.exists():
            ahead.why = "an earlier start has compiled them"
            return ahead
        lock = try_lock(cache / "vllm-graft.lock")
        if lock is None:
            ahead.why = "another worker compiles them"
            return ahead
        most = min(processes or len(os.sched_getaffinity(0)), MAX_PROCESSES)
        ahead._running = _Running(Job(target, tuple(ordered), most), done, lock)
    except OSError as error:
        ahead.why = f"{type(error).__name__}: {error}"
        warning_once(
            f"vllm-graft compiles no kernels ahead, each is compiled where it is first used: "
            f"{ahead.why}"
        )
    return ahead


def keep_cache() -> Path:
    """Triton's folder, which exists; it is named in the environment, as torch's compiler names
    another."""
    from triton import knobs

    path = Path(os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir))
    path.mkdir(parents=True, exist_ok=True)
    return path


def fingerprint(launches: Iterable[Launch], target: tuple[str, int, int]) -> str:
    """A name for what is compiled from our sources by this Triton, whatever its order."""
    import triton

    from vllm_graft.spec_decode import kernels

    # The order of a set differs from process to process.
    listed = sorted(repr(launch) for launch in launches)
    digest = hashlib.sha256(repr((triton.__version__, target, listed)).encode())
    for source in sorted(Path(kernels.__path__[0]).rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def compiling_environment() -> dict[str, str]:
    """The environment of a process that compiles: it imports what this process would import."""
    kept = {name: value for name, value in os.environ.items() if name not in _INTERPRETER}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
