"""The fuzz from end to end with a stand-in for `vllm`: its findings, and its report."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks.fuzz import server as fuzz_server
from benchmarks.fuzz.answers import Answer, Choice, Raw
from benchmarks.fuzz.arms import ARMS, PLAIN, Arm, settings
from benchmarks.fuzz.compare import Judge
from benchmarks.fuzz.requests import CHAT, COMPLETIONS, FuzzRequest, World, generate
from benchmarks.fuzz.rules import STOCK_CHAIN

# Stands in for `vllm`: each answer is a function of the request, in the form of a completion or a
# chat, in one piece or streamed. `--wrong N` answers N's request with another token; `--refuse N`
# with an error.
FAKE = """
import json, sys, zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv[1:]
def number(flag):
    return int(arguments[arguments.index(flag) + 1]) if flag in arguments else 0
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b"vllm:work_total{a='b'} %d\\n" % (not number("--lazy")))
    def head(self, status, kind):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
    def do_POST(self):
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        key = zlib.crc32(text.encode()) % 1000
        if body is None or number("--refuse") > key:
            self.head(400, "application/json")
            error = {"type": "BadRequestError", "code": 400, "message": "no"}
            self.wfile.write(json.dumps({"error": error}).encode())
            return
        chat = "messages" in body
        tokens = [(key + i) % 900 + 10 for i in range(6)]
        if number("--wrong") > key:
            tokens[3] += 1
        streamed = body.get("stream") is True
        parts = [[token] for token in tokens] if streamed else [tokens]
        self.head(200, "text/event-stream" if streamed else "application/json")
        for place, part in enumerate(parts):
            said = " ".join(map(str, part))
            last = place == len(parts) - 1
            choice = {"index": 0, "token_ids": part, "finish_reason": "length" if last else None}
            if chat:
                choice["delta" if streamed else "message"] = {"content": said}
            else:
                choice["text"] = said
            answer = json.dumps({"choices": [choice]})
            self.wfile.write(f"data: {answer}\\n\\n".encode() if streamed else answer.encode())
        if streamed:
            self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *arguments):
        pass
try:
    ThreadingHTTPServer(("127.0.0.1", number("--port")), Handler).serve_forever()
except KeyboardInterrupt:
    pass
"""

RIGHT = Arm("right", lambda folder: [], busy=("vllm:work_total",))
WRONG = Arm("wrong", lambda folder: ["--wrong", "100"])
LAZY = Arm("lazy", lambda folder: ["--lazy", "1"], busy=("vllm:work_total",))
REFUSING = Arm("refusing", lambda folder: ["--refuse", "100"])


@pytest.fixture
def fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run against the stand-in."""
    script = tmp_path / "fake_vllm.py"
    script.write_text(FAKE)
    monkeypatch.setattr(fuzz_server, "COMMAND", (sys.executable, str(script)))
    arms = {arm.name: arm for arm in (RIGHT, WRONG, LAZY, REFUSING)}
    monkeypatch.setattr(fuzz_server, "ARMS", arms)
    return ["--requests", "80", "--out", str(tmp_path / "out")]


def test_a_run_without_differences_succeeds(
    fuzz: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz_server.main([*fuzz, "--arm", "right"]) == 0
    head, line = capsys.readouterr().out.splitlines()[-2:]
    found = dict(zip(head.split(), line.split()))
    assert (found["arm"], found["requests"], found["unexplained"]) == ("right", "80", "0")
    assert int(found["equal"]) > 60
    assert json.loads((tmp_path / "out" / "right.json").read_text()) == {}


@pytest.mark.parametrize("arm", ["wrong", "refusing"])
def test_a_wrong_answer_fails_the_run_and_is_written_down(
    fuzz: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], arm: str
) -> None:
    assert fuzz_server.main([*fuzz, "--arm", "right", arm]) == 1
    printed = capsys.readouterr().out
    assert "UNEXPLAINED" in printed
    told = json.loads((tmp_path / "out" / f"{arm}.json").read_text())
    assert printed.splitlines()[-1].split()[-2:] == [str(len(told)), "0"]
    first = next(iter(told))
    assert told[first]["request"]["number"] == int(first)
    # Sending that request alone shows the fault again.
    assert fuzz_server.main([*fuzz, "--arm", arm, "--only", first]) == 1
    assert capsys.readouterr().out.startswith("1 requests of seed 7")


def test_answers_that_are_altered_on_purpose_are_found(fuzz: list[str]) -> None:
    assert fuzz_server.main([*fuzz, "--arm", "right", "--corrupt", "100"]) == 1


def test_an_arm_that_did_not_do_its_work_fails(
    fuzz: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz_server.main([*fuzz, "--arm", "lazy"]) == 1
    printed = capsys.readouterr().out
    assert "BROKEN: vllm:work_total is 0" in printed
    assert printed.splitlines()[-1].split()[-2:] == ["0", "1"]


def test_an_arm_that_does_not_start_fails(
    fuzz: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopping = Arm("stopping", lambda folder: ["--refuse", "no number"])
    monkeypatch.setattr(fuzz_server, "ARMS", {"stopping": stopping})
    monkeypatch.setattr(fuzz_server, "PLAIN", RIGHT)
    assert fuzz_server.main([*fuzz, "--arm", "stopping", "--requests", "3"]) == 1


def test_every_altered_answer_is_unexplained() -> None:
    """This negative control also uses the rules of the arm that excuses most."""
    asked = [
        request
        for request in generate(5, 300, World.of_pair())
        if request.valid and request.exact and request.get("temperature") == 0
    ]
    judge = Judge(lambda *question: None, STOCK_CHAIN)
    numbers = random.Random(1)
    for request in asked:
        expected, found = (Answer(200, choices={0: Choice("a", [7] * 30)}) for _ in range(2))
        altered = fuzz_server.corrupted(found, numbers, 100)
        verdict = judge.compare(request, expected, found)
        if verdict.rule not in ("stock: rows of drafts", "stock: ids"):
            assert verdict.failed == altered


def test_about_one_token_in_so_many_is_altered() -> None:
    answer = Answer(200, choices={i: Choice("", [7] * 1000) for i in range(20)})
    assert fuzz_server.corrupted(answer, random.Random(1), 100)
    altered = sum(t != 7 for choice in answer.choices.values() for t in choice.tokens or ())
    assert 150 < altered < 250
    assert not fuzz_server.corrupted(Answer(400), random.Random(1), 1)


def test_the_gap_is_read_where_the_reference_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "tokens": ["token_id:3", "token_id:4"],
        "token_logprobs": [-0.1, -0.7],
        "top_logprobs": [{"token_id:3": -0.1}, {"token_id:4": -0.7, "token_id:9": -0.75}],
    }
    choice = {"index": 0, "text": "", "logprobs": places, "finish_reason": "length"}
    sent: list[FuzzRequest] = []

    def send(port: int, request: FuzzRequest) -> Raw:
        sent.append(request)
        return Raw(200, {"choices": [choice]})

    monkeypatch.setattr(fuzz_server, "send", send)
    gap = fuzz_server.gap_by(1)
    body = {"prompt": "a", "stream": True, "echo": True, "temperature": 0}
    asked = FuzzRequest(0, COMPLETIONS, body, abort_after=3)
    assert gap(asked, 0, 1, 9) == pytest.approx(0.05)
    assert gap(asked, 0, 0, 9) is None, "not among the best"
    assert gap(asked, 0, 5, 9) is None
    assert gap(asked, 1, 0, 9) is None
    wanted = {"prompt": "a", "temperature": 0, "logprobs": 5, "return_tokens_as_token_ids": True}
    assert sent[0].body == wanted
    assert sent[0].abort_after is None
    assert fuzz_server.witness(FuzzRequest(0, CHAT, {}))["top_logprobs"] == 5


def test_arms_of_each_part_are_there(tmp_path: Path) -> None:
    flags = {name: " ".join(arm.flags(tmp_path)) for name, arm in ARMS.items()}
    assert "--additional-config" not in flags["chain"]
    assert "--kv-transfer-config" not in flags["chain"]
    assert PLAIN.flags(tmp_path) == []
    for name in ("tree", "auto", "tree-ngram", "ngram", "draft-model", "both-async"):
        assert '"graft": {"tree"' in flags[name]
    for method in ("ngram_gpu", "draft_model"):
        assert sum(f'"method": "{method}"' in each for each in flags.values()) == 1
    for name in ("host-async", "host-layerwise", "both-async", "both-layerwise", "multi"):
        assert '"backend": "segments"' in flags[name]
    assert flags["multi"].count('"HiCacheConnector"') == 2
    assert '"load": "layerwise"' in flags["both-layerwise"]
    shared, environment = settings()
    assert "priority" in shared
    assert environment["VLLM_GRAFT_INTERPRET"] == "1"


def test_arms_share_the_flags_of_the_reference() -> None:
    assert settings()[0] == settings()[0]
    assert all(arm.busy for arm in ARMS.values())
