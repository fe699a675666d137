"""An engine of a proof in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
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
    """What came of an engine.

    Attributes:
        answers: by round; empty where there are none.
        counts: its counters by name, after the last round.
        rows: symbols that parts asked for and that differ from the ledger, by path, as found.
        error: why there are no answers.
    """

    answers: list[list[Answer]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    error: str = ""


@contextlib.contextmanager
def running(target: Path, options: dict[str, Any]) -> Iterator[Any]:
    """A ``vllm.LLM`` with random weights, whose engine core runs in this process."""
    import torch

    from vllm_graft import testing

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # Before anything imports vLLM.
        testing.install()
        torchvision_import.install()
    from vllm_graft.proof import random_weights

    random_weights.register()
    make = testing.running if on_gpu else testing.cpu_engine
    with make(target, **options) as llm:
        yield llm


def start(target: Path, options: dict[str, Any], rounds: Sequence[Round], *, told: bool) -> Any:
    """Start the process; `finish` takes what this returns."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (theirs, target, options, list(rounds), told)
    process = context.Process(target=_serve, args=given, daemon=False)
    process.start()
    theirs.close()
    return process, ours


def finish(started: Any) -> Outcome:
    """Wait for what came of an engine, and end its process if nothing does."""
    process, pipe = started
    try:
        if pipe.poll(_MOST_SECONDS):
            found: Outcome = pipe.recv()
            # Python waits for its children without an end, and some device may not let go of one.
            process.join(_LAST_SECONDS)
            return found
    except EOFError:
        return Outcome(error="its process ended without an answer; its log is above")
    finally:
        process.kill()
    return Outcome(error=f"it gave no answer within {_MOST_SECONDS} s")


def _serve(
    pipe: Connection, target: Path, options: dict[str, Any], rounds: list[Round], told: bool
) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with proving() as seen:
        try:
            with running(target, options) as llm:
                asking = Asking(llm, told=told)
                answers = asking.ask(rounds)
                outcome = Outcome(answers, asking.counts(), seen.rows)
        except Exception as error:  # Of vLLM's, of ours, or of a device.
            outcome = Outcome(rows=seen.rows, error=reason_of(error))
    pipe.send(outcome)
