"""A rank of a server is killed while it answers: no request may hang, and none be answered wrong.

vLLM ends a server of which a process is gone. So what is not answered by then ends with an error.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from benchmarks.fuzz.answers import BROKEN, HANG, Answer, Raw, read
from benchmarks.fuzz.client import send
from benchmarks.fuzz.requests import FuzzRequest
from tests.support.engines.vllm_server import ServerError

SECONDS = 60.0
"""Most seconds from the kill to the last request's end."""
HANG_SECONDS = 240.0
"""A request without an answer for so long hangs. Before the kill, too, and on a slow CPU."""

RANK = re.compile(r"VLLM::(?:EngineCore_DP|Worker_\w*?TP)(\d+)")
"""Titles that vLLM gives to the processes of data-parallel and of tensor-parallel ranks."""


def ranks(group: int) -> Iterator[tuple[int, int]]:
    """Yield number and process id of each rank of a server, whose processes are a group."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            title = RANK.match((folder / "cmdline").read_text())
        except OSError:
            continue  # It has just ended.
        if title is not None and int(after_name[2]) == group:
            yield int(title[1]), int(folder.name)


def kill_last_rank(group: int) -> None:
    """Kill the rank with the largest number.

    Raises:
        ServerError: the server has fewer than two ranks.
    """
    found = sorted(ranks(group))
    if len(found) < 2:
        raise ServerError(f"there are {len(found)} ranks to kill one of: {found}")
    os.kill(found[-1][1], signal.SIGKILL)


def ask(
    port: int, group: int, requests: Sequence[FuzzRequest], workers: int, after: int
) -> tuple[list[Answer], float]:
    """Send requests, and kill a rank at the end of the request number `after`.

    Returns:
        The answers, and the seconds from the kill to the last of them.
    """
    ended, killed, hung = count(1), time.monotonic(), False

    def one(request: FuzzRequest) -> Answer:
        nonlocal killed, hung
        # Others would hang as well.
        raw = Raw(HANG, "not sent") if hung else send(port, request, HANG_SECONDS)
        hung |= raw.status == HANG
        if next(ended) == after:
            killed = time.monotonic()
            kill_last_rank(group)
        return read(request, raw)

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(one, requests))
    return found, time.monotonic() - killed


def was_ended(answer: Answer) -> bool:
    """Whether the server's end has ended a request: no connection, an error, half an answer."""
    return answer.status == BROKEN or answer.status >= 500 or bool(answer.faults)


def judged(found: Sequence[Answer], seconds: float) -> list[str]:
    """List what is wrong with the answers as a whole; wrong ones are found by comparison."""
    wrong = []
    if seconds > SECONDS:
        wrong.append(f"the last request ended {seconds:.0f} s after the kill")
    if not any(map(was_ended, found)):
        wrong.append("the kill has ended no request")
    return wrong
