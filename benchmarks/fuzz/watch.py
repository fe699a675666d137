"""A vLLM plugin of the fuzz: CPU time on the steps' threads for what one request brings along.

`plugin_path` makes a folder for `PYTHONPATH` in which vLLM finds it, so it runs in every process.
It measures calls (`WATCHED`) with the thread's own clock: wall time says nothing on a busy machine.
A line of JSON is written for each call that takes long; `calls` reads them.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FILE = "VLLM_GRAFT_FUZZ_STEPS"
"""Environment variable with the path of the file that lines are written to."""
NOTED = 1.0
"""Milliseconds of a call that is written down."""
MOST = 1000
"""Calls that a process writes down."""

WATCHED: dict[tuple[str, str, str], dict[str, tuple[str, ...]]] = {
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "add_requests"): {
        "model_state": ("add_request",),
        "sampler": ("add_request",),
        "req_states": ("add_request",),
    },
    ("vllm.v1.core.sched.scheduler", "Scheduler", "add_request"): {
        "": ("add_request",),
        "connector": ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"),
    },
}
"""Module, class and method before whose first call the listed methods of its parts are measured."""


def plugin_path(folder: Path) -> Path:
    """Write the plugin's entry point below `folder`; return what `PYTHONPATH` has to name."""
    named = folder / "fuzz_watch-0.dist-info"
    named.mkdir(parents=True, exist_ok=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: fuzz-watch\nVersion: 0\n")
    (named / "entry_points.txt").write_text("[vllm.general_plugins]\nfuzz = fuzz_watch:register\n")
    (folder / "fuzz_watch.py").write_bytes(Path(__file__).read_bytes())
    return folder


def register() -> None:
    """Wait for the modules of `WATCHED`; vLLM calls this in each of its processes."""
    from vllm_graft.seams.post_import import after_import

    for (module, owner, method), parts in WATCHED.items():
        after_import(module, functools.partial(_attach, owner, method, parts))
    if os.environ.get("GRAFT_TEST_REPLICAS"):
        from tests.support.engines.cpu_replicas import mend

        after_import("vllm.distributed.device_communicators.cpu_communicator", mend)


def _attach(owner: str, method: str, parts: dict[str, tuple[str, ...]], module: Any) -> None:
    stock = getattr(module, owner)
    original = getattr(stock, method)

    @functools.wraps(original)
    def first(self: Any, *arguments: Any) -> Any:
        if "_fuzz_watched" not in vars(self):
            self._fuzz_watched = True
            for part, names in parts.items():
                measure(getattr(self, part) if part else self, names)
            if "" in parts:
                return getattr(self, method)(*arguments)
        return original(self, *arguments)

    setattr(stock, method, first)


def measure(part: Any, names: tuple[str, ...]) -> None:
    """Measure calls of an object's methods; there is none to measure without the object."""
    for name in names if part is not None else ():
        setattr(part, name, _timed(getattr(part, name), f"{type(part).__name__}.{name}"))
        _write({"watched": f"{type(part).__name__}.{name}"})


def _timed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    left = MOST

    def timed(*arguments: Any, **named: Any) -> Any:
        nonlocal left
        gc.disable()  # A collection is nobody's work in particular.
        begin = time.thread_time()
        try:
            return call(*arguments, **named)
        finally:
            ms = 1e3 * (time.thread_time() - begin)
            gc.enable()
            if ms > NOTED and left > 0:
                left -= 1
                _write({"call": name, "ms": round(ms, 2), "request": _request(*arguments, **named)})

    return timed


def _request(*arguments: Any, req_id: str | None = None, **named: Any) -> str | None:
    """Return the id of the request among a call's arguments, if it is there."""
    ids = (getattr(each, name, None) for each in arguments for name in ("req_id", "request_id"))
    return next((each for each in ids if each is not None), req_id)


def _write(line: dict[str, Any]) -> None:
    with open(os.environ[FILE], "a") as file:
        file.write(json.dumps(line) + "\n")


class Call(NamedTuple):
    """A call that took long: function, milliseconds, and its request's number if that is known."""

    name: str
    ms: float
    number: int | None


def calls(file: Path, start: int = 0) -> list[Call]:
    """Read the calls that were written down from byte `start` of the file on."""
    found = []
    for line in map(json.loads, _lines(file, start)):
        if "ms" in line:
            number = re.search(r"fuzz-(\d+)", line["request"] or "")
            found.append(Call(line["call"], line["ms"], int(number[1]) if number else None))
    return found


def watched(file: Path) -> set[str]:
    """Return the functions that are measured."""
    return {line["watched"] for line in map(json.loads, _lines(file, 0)) if "watched" in line}


def _lines(file: Path, start: int) -> list[str]:
    return file.read_bytes()[start:].decode().splitlines() if file.exists() else []
