"""Send requests to a server, several at a time, and hang up in the middle of those that say so."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.fuzz.answers import BROKEN, HANG, Raw
from benchmarks.fuzz.requests import FuzzRequest

HANG_SECONDS = 1200.0
"""It is large because a long answer is slow where kernels are interpreted."""


def send_all(
    port: int,
    requests: Sequence[FuzzRequest],
    workers: int,
    told: Callable[[int], object] = lambda count: None,
) -> list[Raw]:
    """Send `requests` in their order, `workers` at a time, and return their answers.

    `told` gets the number of answers so far.
    """
    found: list[Raw] = []
    with ThreadPoolExecutor(workers) as pool:
        for raw in pool.map(lambda request: send(port, request), requests):
            found.append(raw)
            told(len(found))
    return found


def send(port: int, request: FuzzRequest, timeout: float = HANG_SECONDS) -> Raw:
    """Send one request over a connection of its own, and return the answer."""
    body = request.body if isinstance(request.body, str) else json.dumps(request.body)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        # The engine's name of the request then says which it is.
        head = {"content-type": "application/json", "x-request-id": f"fuzz-{request.number}"}
        connection.request("POST", request.path, body.encode(), head)
        if request.abort_after is not None and not request.stream:
            return Raw(200, aborted=True)
        return _receive(connection.getresponse(), request.abort_after)
    except TimeoutError as error:
        return Raw(HANG, repr(error))
    except (OSError, http.client.HTTPException) as error:
        return Raw(BROKEN, repr(error))
    finally:
        connection.close()


def _receive(response: http.client.HTTPResponse, abort_after: int | None) -> Raw:
    kind = response.getheader("content-type") or ""
    if "event-stream" not in kind:
        return Raw(response.status, _decoded(response.read()))
    events: list[str] = []
    while abort_after is None or len(events) < abort_after:
        line = response.readline()
        if not line:
            break
        if line.startswith(b"data: "):
            events.append(line[6:].decode().strip())
            if events[-1] == "[DONE]":
                break
    ended = bool(events) and events[-1] == "[DONE]"
    return Raw(response.status, None, tuple(events), abort_after is not None and not ended)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
