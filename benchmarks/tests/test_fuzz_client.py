"""The client of the fuzz against a small server: streams, errors, hanging up, no answer at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.fuzz.answers import BROKEN, HANG, Raw
from benchmarks.fuzz.client import send, send_all
from benchmarks.fuzz.requests import COMPLETIONS, FuzzRequest


class Server(ThreadingHTTPServer):
    """Answer by the request's `what`, and count the requests under way."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.working = self.most = 0
        self.hung_up = threading.Event()
        self.order: list[int] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients hang up here on purpose."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        body: dict[str, Any] = (
            json.loads(text) if text.startswith("{") else {"what": "echo", "text": text}
        )
        with self.server.lock:
            self.server.order.append(body.get("number", 0))
            self.server.working += 1
            self.server.most = max(self.server.most, self.server.working)
        try:
            getattr(self, f"_{body['what']}")(body)
        finally:
            with self.server.lock:
                self.server.working -= 1

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    def _echo(self, body: dict[str, Any]) -> None:
        time.sleep(body.get("seconds", 0))
        self._head(body.get("status", 200), "application/json")
        self.wfile.write(json.dumps(body).encode())

    def _text(self, body: dict[str, Any]) -> None:
        self._head(500, "text/plain")
        self.wfile.write(b"Internal Server Error")

    def _stream(self, body: dict[str, Any]) -> None:
        self._head(200, "text/event-stream; charset=utf-8")
        try:
            for number in range(body["events"]):
                self.wfile.write(f"data: {number}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.01)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.hung_up.set()

    def _drop(self, body: dict[str, Any]) -> None:
        self.close_connection = True
        self.connection.close()

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


def request(what: str, abort_after: int | None = None, **body: Any) -> FuzzRequest:
    body = {"what": what, "number": 0, **body}
    return FuzzRequest(body["number"], COMPLETIONS, body, abort_after=abort_after)


def test_an_answer_in_one_piece(server: Server) -> None:
    asked = request("echo", status=404)
    assert send(server.server_port, asked) == Raw(404, asked.body)
    assert send(server.server_port, request("text")) == Raw(500, "Internal Server Error")


def test_a_body_that_is_no_json_is_sent_as_it_is(server: Server) -> None:
    raw = send(server.server_port, FuzzRequest(0, COMPLETIONS, '"cut'))
    assert raw.body["text"] == '"cut'


def test_a_stream_is_read_to_its_end(server: Server) -> None:
    raw = send(server.server_port, request("stream", stream=True, events=3))
    assert raw == Raw(200, None, ("0", "1", "2", "[DONE]"))


@pytest.mark.parametrize("after", [0, 2])
def test_a_client_hangs_up_in_mid_stream(server: Server, after: int) -> None:
    raw = send(server.server_port, request("stream", after, stream=True, events=10_000))
    assert raw == Raw(200, None, tuple(map(str, range(after))), aborted=True)
    assert server.hung_up.wait(20), "the server has to notice"


def test_a_stream_that_ends_first_is_whole(server: Server) -> None:
    raw = send(server.server_port, request("stream", 5, stream=True, events=2))
    assert raw == Raw(200, None, ("0", "1", "[DONE]"))


def test_a_client_that_hangs_up_does_not_wait_for_an_answer_in_one_piece(server: Server) -> None:
    asked = request("echo", 0, seconds=1)
    assert send(server.server_port, asked, timeout=0.5) == Raw(200, aborted=True)


def test_no_answer_and_a_broken_connection_are_told_apart(server: Server) -> None:
    assert send(server.server_port, request("echo", seconds=3), timeout=0.2).status == HANG
    assert send(server.server_port, request("drop")).status == BROKEN


def test_requests_begin_in_their_order_some_at_a_time(server: Server) -> None:
    asked = [request("echo", number=number, seconds=0.02) for number in range(24)]
    told: list[int] = []
    found = send_all(server.server_port, asked, 4, told.append)
    assert [raw.body["number"] for raw in found] == list(range(24))
    assert told == list(range(1, 25))
    assert 1 < server.most <= 4
    assert all(abs(place - number) < 4 for place, number in enumerate(server.order))
