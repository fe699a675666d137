"""A server that runs already: a stand-in that counts as vLLM does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.shipped_pair import SHIPPED
from vllm_graft.bench.common.closed_loop import Case, Request
from vllm_graft.bench.common.report import BenchmarkError
from vllm_graft.bench.trees.running_server import RunningServer
from vllm_graft.cli import main


class Vllm(ThreadingHTTPServer):
    """Answers with as many tokens as asked for, two per step, and sees what was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.tokens, self.live, self.most, self.refuses = 0, 0, 0, False
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self) -> str:
        steps = self.tokens // 2
        counted = {"generation_tokens": self.tokens, "spec_decode_num_drafts": steps}
        counted |= {"spec_decode_num_accepted_tokens": steps, "spec_decode_num_draft_tokens": 0}
        return "".join(
            f'vllm:{name}_total{{engine="0"}} {value}.0\n' for name, value in counted.items()
        )


class Handler(BaseHTTPRequestHandler):
    server: Vllm

    def do_GET(self) -> None:
        card = {"id": "pair", "root": str(SHIPPED / "target"), "max_model_len": 64}
        pages = {"/v1/models": json.dumps({"data": [card]}), "/metrics": self.server.metrics()}
        self.answer(pages[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.live += 1
            self.server.most = max(self.server.most, self.server.live)
        time.sleep(0.02)
        with self.server.lock:
            self.server.live -= 1
            self.server.tokens += body["max_tokens"]
        self.answer("{}", 400 if self.server.refuses else 200)

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vllm]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Vllm() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_its_own_counters_tell(vllm: Vllm) -> None:
    server = RunningServer(vllm.url)
    assert (server.model, server.longest, server.root) == ("pair", 64, str(SHIPPED / "target"))
    server.prompts = [Request({"prompt_token_ids": [1, 2]}), Request({"prompt_token_ids": [3]})]
    server.send(Case(0.5, 2, 7, 6, first=3))
    measured = server.recv()
    assert measured.acceptance == 2.0
    assert 0 < measured.rate < 2 * 6 / 0.02
    assert vllm.most == 2, "requests in flight"
    assert sorted(body["seed"] for body in vllm.asked) == list(range(3, 10))
    assert {body["seed"]: body["prompt"] for body in vllm.asked}[3] == [3]
    assert all(body["temperature"] == 0.5 and body["ignore_eos"] for body in vllm.asked)


def test_what_a_request_says_is_sent(vllm: Vllm) -> None:
    server = RunningServer(vllm.url)
    told = {"prompt_token_ids": [1], "cache_salt": "me"}
    server.prompts = [Request(told, 3, "s", {"type": "object"}, "x"), Request(told, 9, "s")]
    server.send(Case(0.0, 2, 4, 6))
    # Requests of a session follow each other, so that one is in flight.
    with pytest.raises(BenchmarkError, match="no more than 1 of the dataset's sessions can be"):
        server.recv()
    server.send(Case(0.0, 1, 2, 6))
    server.recv()
    bound, free = vllm.asked
    assert (bound["structured_outputs"], bound["ignore_eos"]) == (
        {"json": {"type": "object"}},
        False,
    )
    assert (bound["cache_salt"], bound["max_tokens"]) == ("me", 3)
    assert bound["vllm_xargs"] == {"graft_prediction": "x"}
    assert (free["max_tokens"], free["ignore_eos"]) == (6, True)
    assert not {"structured_outputs", "vllm_xargs"} & free.keys()


def test_a_refused_request_is_an_error(vllm: Vllm) -> None:
    vllm.refuses = True
    server = RunningServer(vllm.url)
    server.prompts = [Request({"prompt_token_ids": [1]})]
    server.send(Case(0.0, 1, 2, 4))
    with pytest.raises(BenchmarkError, match="a request got 400"):
        server.recv()


def test_nobody_answers(vllm: Vllm) -> None:
    vllm.shutdown()
    vllm.server_close()
    with pytest.raises(BenchmarkError, match=r"no vLLM server answers there .*Give the address"):
        RunningServer(vllm.url)


def test_the_command(vllm: Vllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "def main"}\n')
    file = tmp_path / "rows.json"
    given = ["bench", "trees", "--url", vllm.url, "--dataset", str(questions), "--rounds", "1"]
    given += ["--requests-in-flight", "2", "--tokens", "8", "--output", str(file)]
    assert main(given) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[-1].endswith("without --url, stock is compared")
    [row] = json.loads(file.read_text())
    assert (row["arm"], row["requests_in_flight"], row["acceptance_length"]) == ("server", 2, 2.0)
    assert row["step_ms"] is None
    assert "1 of 1 measured" in said.err
    assert main([*given, "model", "--max-model-len", "64"]) == 1
    assert "--url: --max-model-len 64 is for engines that are started" in capsys.readouterr().err
    assert main([*given, "no/such-model"]) == 1
    assert "the tokenizer of no/such-model can't be read here" in capsys.readouterr().err
