"""An engine of a proof in a process of its own."""

import contextlib
import multiprocessing
import os
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_graft.base.values import reason_of
from vllm_graft.proof.questions import Answer, Asking, Round
from vllm_graft.seams.permission import proving
from vllm_graft.testing import torchvision_import

_MOST_SECONDS, _LAST_SECONDS = 600, 30


@dataclass(frozen=True)
class Outcome:
    """What came of an engine: answers by round, or the `error` in their place; its counters after
    the last round; symbols that differ from the ledger, by path, as found (`rows`); and the seconds
    from its configuration to the first request (`starting`)."""

    answers: list[list[Answer]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    error: str = ""
    starting: float = 0.0


@contextlib.contextmanager
def running(target: Path, options: dict[str, Any]) -> Iterator[Any]:
    """A ``vllm.LLM`` with random weights, whose engine core runs in this process."""
    make = _prepared()
    with make(target, **options) as llm:
        yield llm


def _prepared() -> Any:
    """Import what an engine takes, which is most of the time until one runs; what makes one."""
    import torch

    from vllm_graft import testing

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # Before anything imports vLLM.
        testing.install()
        torchvision_import.install()
    from vllm_graft.proof import random_weights

    random_weights.register()
    return testing.running if on_gpu else testing.cpu_engine


@dataclass
class EngineProcess:
    """A process that prepares itself for an engine, and then waits to be asked. `told`: whether the
    engine gives all log-probabilities."""

    told: bool

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.told), daemon=False)
        self._process.start()
        theirs.close()

    def ask(self, target: Path, options: dict[str, Any], rounds: Sequence[Round]) -> None:
        """Let it make an engine and answer; `finish` waits for that."""
        # Torch would share the memory of images, which this process may free too early. A process
        # that ended has said why, which `finish` reads.
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(pickle.dumps((target, options, list(rounds))))

    def finish(self) -> Outcome:
        """Wait for what came of the engine, and end the process."""
        try:
            if self._pipe.poll(_MOST_SECONDS):
                found: Outcome = self._pipe.recv()
                # Some device may not let go of a process.
                self._process.join(_LAST_SECONDS)
                return found
        except (EOFError, OSError):
            return Outcome(error="its process ended without an answer; its log is above")
        finally:
            self.end()
        return Outcome(error=f"it gave no answer within {_MOST_SECONDS} s")

    def end(self) -> None:
        self._process.kill()


@contextlib.contextmanager
def both() -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Yield a process for the engine without our parts and one for that with them."""
    pair = EngineProcess(told=True), EngineProcess(told=False)
    try:
        yield pair
    finally:
        for each in pair:
            each.end()


def _serve(pipe: Connection, told: bool) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with proving() as seen:
        try:
            _prepared()
            target, options, rounds = pickle.loads(pipe.recv_bytes())
            began = time.monotonic()
            with running(target, options) as llm:
                starting = time.monotonic() - began
                asking = Asking(llm, told=told)
                answers = asking.ask(rounds)
                outcome = Outcome(answers, asking.counts(), seen.rows, starting=starting)
        except Exception as error:  # Of vLLM's, of ours, or of a device.
            outcome = Outcome(rows=seen.rows, error=reason_of(error))
    pipe.send(outcome)
