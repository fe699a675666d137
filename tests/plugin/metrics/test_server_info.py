"""``vllm-graft info``: a server's page is read as Prometheus' own parser reads it."""

import io
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import parser

from tests.plugin.metrics.stand_ins import ROWS, Logger, Stats
from vllm_graft import cli
from vllm_graft.metrics import server_info
from vllm_graft.metrics.board import Board
from vllm_graft.metrics.relay import KEY

UGLY = 'a "tree"\\ of\n7 {nodes}, and more'


def page(state: str = "on") -> str:
    logger = Logger(engines=2)
    board = Board({"toy": ROWS}, logger)
    states = [["toy", state, UGLY], ["vit", "off", "text only"]]
    news = {"toy": {"done": 3, "no": {"late": 2}, "sizes": {"3": 2}}}
    for engine in (0, 1):
        message = {"states": states, "news": news}
        board.record(Stats(kv_connector_stats={KEY: message}), engine)
    return logger.text


@contextmanager
def server(text: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Run the command against a page; return its exit status and what it printed."""
    monkeypatch.setenv("no_proxy", "*")

    def run(text: str, *arguments: str) -> tuple[int, str]:
        with server(text) as url:
            status = cli.main(["info", "--url", url, *arguments])
        return status, capsys.readouterr().out

    return run


def test_samples_are_those_of_prometheus_parser() -> None:
    text = page()
    expected = [
        (sample.name, sample.labels, sample.value)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    ]
    found = [(one.name, one.labels, one.value) for one in server_info.samples(text)]
    assert found == expected
    assert len(found) > 20
    assert any(labels.get("detail") == UGLY for _, labels, _ in found)


def test_parts_and_numbers_of_a_server(ask: Ask) -> None:
    status, printed = ask(page())
    assert status == 0
    assert "toy (0)  on" in printed
    assert "vit (1)  off  text only" in printed
    # Engines are added up.
    assert "vllm:graft_toy_declined_total{reason=late}  4" in printed
    assert "_created" not in printed


@pytest.mark.parametrize("state", ["declined", "missing"])
def test_a_part_that_was_asked_for_and_is_not_on_is_an_exit_status(ask: Ask, state: str) -> None:
    status, printed = ask(page(state), "--json")
    assert status == 1
    told = json.loads(printed)
    assert told["ok"] is False
    assert {part["state"] for part in told["parts"]} == {state, "off"}
    assert told["parts"][0]["detail"] == UGLY
    assert told["metrics"]["vllm:graft_toy_done_total"] == 6


COUNTED = """\
vllm:graft_info{engine="0",part="tree",state="on",detail="d",version="1"} 1
vllm:graft_info{engine="0",part="hicache",state="on",detail="d",version="1"} 1
vllm:graft_tree_trees_total{engine="0"} 1000
vllm:graft_tree_trees_total{engine="1"} 500
vllm:graft_tree_nodes_accepted_total{engine="0"} 3450
vllm:graft_hicache_hit_tokens_host_total{engine="0"} 50
vllm:graft_hicache_hit_tokens_storage_total{engine="0"} 11
vllm:prompt_tokens_total{engine="0"} 90
vllm:prompt_tokens_total{engine="1"} 10
vllm:prompt_tokens_cached_total{engine="0"} 7
"""


def test_it_first_says_what_a_person_asks(ask: Ask) -> None:
    status, printed = ask(COUNTED)
    assert status == 0
    assert printed.splitlines()[1:3] == [
        "trees: 3.3 tokens per step (1,500 steps)",
        "host cache: 61% of prompt tokens",
    ]
    assert "vllm:prompt_tokens" not in printed
    told = json.loads(ask(COUNTED, "--json")[1])["answers"]
    assert told == {"trees": 1500, "tokens_per_step": 3.3, "cached_share": 0.61}


def test_what_was_not_counted_is_not_answered(ask: Ask) -> None:
    lines = COUNTED.splitlines(keepends=True)
    _, printed = ask("".join(lines[:2]))
    assert "tokens" not in printed
    off = lines[1].replace('"on"', '"off"')
    _, printed = ask(off + "".join(lines[2:]))
    assert "tokens per step" in printed
    assert "host cache:" not in printed
    told = ask("".join(lines[:2]) + "vllm:graft_tree_trees_total NaN\n", "--json")[1]
    assert json.loads(told)["answers"] == {}


def test_a_server_without_our_parts_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with server("vllm:num_requests_running 0.0\n") as url:
        said = refused(url)
    assert re.search(r"has no vllm:graft_info.*disable-log-stats", said)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
END = b"\r\nContent-Length: 0\r\n\r\n"
SERIES = b'vllm:graft_info{engine="0",part="tree",state="on",detail="%s",version="1"} 1\n'
INFO = OK + SERIES % b"d"
ANSWERS = {
    "nothing": b"",
    "a page of words": OK + b"<html>\nHello world\n</html>\n",
    "no number": INFO + b"vllm:graft_x abc\n",
    "number of 5000 digits": INFO + b"vllm:graft_x " + b"9" * 4200 + b"\n",
    "label without a name": INFO + b'vllm:graft_x{ ="1"} 1\n',
    "label list without an end": INFO + b"vllm:graft_x{" + b"a" * 200_000 + b"} 1\n",
    "a long line of vLLM's": INFO + b'vllm:prompt_tokens_total{a="' + b'\\"' * 500_000 + b'"} 1\n',
    "many escaped quotes": INFO + b'vllm:graft_x{a="' + b'\\"' * 500_000 + b'"} 1\n',
    "banner of ssh": b"SSH-2.0-OpenSSH_9.6\x1b[2J\r\n",
    "short body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\nabc",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    "long header": b"HTTP/1.1 200 OK\r\nA: " + b"b" * 200_000 + b"\r\n\r\n",
    "redirect to a file": b"HTTP/1.1 302 F\r\nLocation: file:///etc/passwd" + END,
    "redirect to itself": b"HTTP/1.1 302 F\r\nLocation: /metrics" + END,
    "status 500": b"HTTP/1.1 500 \x1b[31mX" + END,
    "compressed": INFO.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)[:-40],
    "gigabytes": (OK, *[b"# " + b"x" * (1 << 20)] * 1500),
    "a byte at a time": (OK, *[b"a"] * 40),
    "a header's byte at a time": (OK[:20], *[b"a"] * 40),
}


@contextmanager
def raw_server(pieces: tuple[bytes, ...], sent: list[int]) -> Iterator[str]:
    """A server that sends pieces, single bytes slowly, until nobody listens; it counts bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            listener.close()  # A client may try again.
            with connection, suppress(OSError):
                connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)
                    sent.append(len(piece))
                    time.sleep(0.05 if len(piece) == 1 else 0)

        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=serve)
        thread.start()
        yield url
        thread.join()


def refused(url: str) -> str:
    """What the command says, in one line that a terminal does not obey, with its own status."""
    told = io.StringIO()
    with redirect_stderr(told):
        assert cli.main(["info", "--url", url]) == cli.NOT_ASKED != 1
    said = told.getvalue().removesuffix("\n")
    assert said.isprintable()
    assert len(said) < 1000
    return said


@pytest.mark.parametrize("name", ANSWERS)
def test_a_hostile_server_is_one_line_of_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(server_info, "SECONDS", 1.0 if "a time" in name else 60.0)
    answer, sent = ANSWERS[name], list[int]()
    with raw_server(answer if isinstance(answer, tuple) else (answer,), sent) as url:
        said = refused(url)
    assert ("within 1 s" in said) == ("a time" in name)
    # What was not read lies in the buffers of the sockets.
    assert sum(sent) < server_info.MAX_BYTES + (32 << 20)


@pytest.mark.parametrize("escape", ["\x1b]0;OWNED\x07\x1b[2J", "\x9b2J", "\r", "\u202e"])
def test_control_characters_of_labels_are_escaped(ask: Ask, escape: str) -> None:
    status, printed = ask((SERIES % escape.encode()).decode())
    assert status == 0
    assert all(line.isprintable() for line in printed.splitlines())
    assert repr(escape)[1:-1] in printed


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:1", "nonsense", "http://[::1", "ftp://127.0.0.1:1", "", "\x1b[2J"),
        *("file:///etc/hostname", "http://a b/", "http://127.0.0.1:99999", "http://127.0.0.1:abc"),
        *("http://\ud800", "x" * 100_000, "http://127.0.0.1:1/\r\nX: y"),
        "http://127.0.0.1:1/?s3cret",
        *("http://user:s3cret@127.0.0.1:1", "http://user:s3c/s3cret@[::1", "u:s3cret@127.0.0.1:1"),
        *("http://a:s3cret@b:s3cret@127.0.0.1:abc", "http:u:s3cret@127.0.0.1"),
        *("u:s3cret//x@127.0.0.1:1", "http:/u:s3cret//x@127.0.0.1:1"),
        *(f"http://127.0.0.1:1{end}@127.0.0.1" for end in ("//s3c", "?s3c", "#s3c")),
    ],
)
def test_a_server_that_cannot_be_asked(url: str) -> None:
    said = refused(url)
    assert "can't be read" in said
    assert "s3c" not in said


@pytest.mark.parametrize("end", ["/", "?", "#"])
def test_no_part_of_a_password_is_shown(end: str) -> None:
    """Digits before its first slash would pass for a port."""
    assert "4321" not in refused(f"http://localhost:4321{end}/x@127.0.0.1:1")


@pytest.mark.parametrize("number", ["NaN", "+Inf", "-Inf"])
def test_json_has_no_number_that_is_none(ask: Ask, number: str) -> None:
    text = f"{SERIES.decode()}vllm:graft_a {number}\nvllm:graft_b 2\n"
    _, printed = ask(text, "--json")
    told = json.loads(printed, parse_constant=pytest.fail)
    assert told["metrics"] == {"vllm:graft_a": None, "vllm:graft_b": 2}


def test_nobody_waits_for_a_slow_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups: list[threading.Thread] = []
    end = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        lookups.append(threading.current_thread())
        end.wait(60)
        raise OSError("no such name")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(server_info, "SECONDS", 0.2)
    try:
        assert "within 0.2 s" in refused("http://slow.example:1")
        [lookup] = lookups
        assert lookup.is_alive()
        assert lookup.daemon  # The interpreter does not wait for it either.
    finally:
        end.set()
    lookup.join()
