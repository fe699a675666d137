"""Disturbances of a server that answers: resets, RPCs, broken bodies, sleep, reloads.

None of it may change an answer. Each disturbance is a row of `TROUBLES`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

from tests.support.engines.vllm_server import ServerError

SECONDS = 1.5
"""Pause between two disturbances."""


def call(port: int, path: str, body: object = None, method: str = "POST") -> str:
    """Ask a server for something other than an answer.

    Raises:
        ServerError: it answers with an error, or not at all.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    text = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, text, {"content-type": "application/json"})
        response = connection.getresponse()
        said = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{method} {path}: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ServerError(f"{method} {path}: {response.status} {said[:300]}")
    return said


def _rpc(port: int) -> None:
    if '"version"' not in call(port, "/collective_rpc", {"method": "graft_info"}):
        raise ServerError("graft_info answers nothing")


def _broken(port: int) -> None:
    """Send a part of a body, and hang up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as there:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        there.sendall(head + b'Content-Length: 500\r\n\r\n{"model"')


def _sleep(port: int) -> None:
    try:
        # Running requests are kept; other modes end them.
        call(port, "/sleep?level=1&mode=keep")
    finally:
        call(port, "/wake_up")


def reload(port: int, weights: str | None = None) -> None:
    """Load weights anew, those of a folder if one is given."""
    given = {} if weights is None else {"weights_path": weights}
    call(port, "/collective_rpc", {"method": "reload_weights", "kwargs": given})


TROUBLES: dict[str, Callable[[int], object]] = {
    "reset": lambda port: call(port, "/reset_prefix_cache"),
    "reset external": lambda port: call(port, "/reset_prefix_cache?reset_external=true"),
    "reset running": lambda port: call(port, "/reset_prefix_cache?reset_running_requests=true"),
    "reset images": lambda port: call(port, "/reset_mm_cache"),
    "reset encoder": lambda port: call(port, "/reset_encoder_cache"),
    "metrics": lambda port: call(port, "/metrics", method="GET"),
    "graft_info": _rpc,
    "broken body": _broken,
    "sleep": _sleep,
    "reload": reload,
}
ALL = tuple(TROUBLES)


@contextlib.contextmanager
def disturbing(port: int, names: tuple[str, ...], seed: int) -> Iterator[Counter[str]]:
    """Disturb a server until the block ends; yield how often each disturbance came.

    A disturbance that the server refuses is counted as `"NAME: why"`.
    """
    done: Counter[str] = Counter()
    over = threading.Event()
    numbers = random.Random(f"trouble {seed}")

    def disturb() -> None:
        while names and not over.wait(SECONDS):
            name = numbers.choice(names)
            try:
                TROUBLES[name](port)
                done[name] += 1
            except (OSError, ServerError) as error:
                done[f"{name}: {error}"] += 1

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join(300)
