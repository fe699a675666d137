"""``vllm-graft info``: a server's page is read as Prometheus' own parser reads it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import parser

from tests.plugin.metrics.stand_ins import ROWS, Logger, Stats
from vllm_graft import cli
from vllm_graft.metrics import exposition
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
        thread = threading.Thread(target=http.serve_forever)
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
    found = [(name, dict(labels), value) for name, labels, value in exposition.samples(text)]
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


def test_a_server_without_our_parts_is_told_apart(ask: Ask) -> None:
    with pytest.raises(SystemExit, match=r"has no vllm:graft_info.*disable-log-stats"):
        ask("vllm:num_requests_running 0.0\n")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://[::1"])
def test_a_server_that_cannot_be_asked(url: str) -> None:
    with pytest.raises(SystemExit, match="can't be read"):
        cli.main(["info", "--url", url])
