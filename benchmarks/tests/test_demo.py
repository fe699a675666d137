from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import demo
from benchmarks.demo import Answers
from tests.support.engines import pair_server
from tests.support.engines.vllm_server import ServerError, SpecDecodeCounters

# Stands in for `vllm`: answers a prompt with the integers from the sum of its bytes on; with
# `--salt`, at temperature 1, from one more.
FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv[1:]
salt = 1 if "--salt" in arguments else 0
drafts = 0
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(f"vllm:spec_decode_num_drafts_total {drafts}\\n"
                             f"vllm:spec_decode_num_accepted_tokens_total {2 * drafts}\\n".encode())
    def do_POST(self):
        global drafts
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "--refuse" in arguments:
            self.send_response(400)
            self.end_headers()
            return
        drafts += 1
        first = sum(body["prompt"].encode()) + salt * int(body["temperature"])
        ids = list(range(first, first + body["max_tokens"]))
        self.send_response(200)
        streamed = body.get("stream", False)
        self.send_header("content-type", "text/event-stream" if streamed else "application/json")
        self.end_headers()
        parts = [[i] for i in ids] if streamed else [ids]
        for part in parts:
            choice = {"index": 0, "text": " ".join(map(str, part)), "token_ids": part}
            answer = json.dumps({"id": "x", "object": "text_completion", "created": 0,
                                 "model": body["model"], "choices": [choice]})
            self.wfile.write(f"data: {answer}\\n\\n".encode() if streamed else answer.encode())
        if streamed:
            self.wfile.write(b"data: [DONE]\\n\\n")
    def log_message(self, *arguments):
        pass
port = int(arguments[arguments.index("--port") + 1])
try:
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
except KeyboardInterrupt:
    pass
"""


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the demo run the stand-in, on prompts of its own, and without waiting."""
    script = tmp_path / "fake_vllm.py"
    script.write_text(FAKE)
    monkeypatch.setattr(demo, "COMMAND", (sys.executable, str(script)))
    (tmp_path / "prompts.json").write_text(json.dumps(["a", "bc", "d"]))
    monkeypatch.setattr(demo, "PAIR", tmp_path)
    monkeypatch.setattr(pair_server, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(demo, "on_cuda", lambda: False)
    # Only the demo's own handlers count: servers that it starts have to hear SIGINT.
    deaf = SimpleNamespace(**{**vars(signal), "signal": lambda *arguments: None})
    monkeypatch.setattr(demo, "signal", deaf)


def answers(greedy: list[list[int]], sampled: list[list[int]], accepted: int = 0) -> Answers:
    counters = SpecDecodeCounters(drafts=4 if accepted else 0, accepted=accepted)
    return Answers(greedy, sampled, counters, counters)


def test_the_table_shows_lengths_and_how_many_answers_are_equal() -> None:
    plain = answers([[1], [2]], [[3], [4]])
    text = demo.table({"tree": answers([[1], [2]], [[3], [5]], 6), "plain": plain}, plain)
    _, tree, last = text.splitlines()
    assert tree.split() == ["tree", "2.50", "2.50", "yes", "1", "of", "2"]
    assert last.split() == ["plain", "1", "1", "yes", "yes"]


def test_exact_needs_every_greedy_and_every_seeded_answer() -> None:
    plain = answers([[1], [2]], [[3], [4]])
    assert demo.exact(answers([[1], [2]], [[3], [4]], 6), plain)
    assert not demo.exact(answers([[1], [0]], [[3], [4]], 6), plain)
    assert not demo.exact(answers([[1], [2]], [[3], [0]], 6), plain)


def test_only_the_tree_has_graft_keys() -> None:
    keys = ("--additional-config", "--kv-transfer-config")
    assert any(flag.startswith(keys) for flag in demo.TREE.flags)
    assert not any(flag.startswith(keys) for flag in (*demo.CHAIN.flags, *demo.PLAIN.flags))
    assert json.loads(demo.CHAIN.flags[1])["num_speculative_tokens"] == 5


@pytest.mark.usefixtures("fake_vllm")
def test_the_demo_streams_compares_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("--- answer ---\n979899") == 3
    # The stand-in accepts two tokens per draft.
    assert printed.count("3.00") == 6
    assert "FAILED" not in printed


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("cuda", [False, True])
def test_the_demo_fails_when_the_tree_samples_differently(
    cuda: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "on_cuda", lambda: cuda)
    monkeypatch.setattr(demo, "TREE", demo.Arm("tree", ("--salt",)))
    assert demo.main() == 1
    assert "FAILED: the tree's answers differ" in capsys.readouterr().out


@pytest.mark.usefixtures("fake_vllm")
def test_ctrl_c_ends_the_demo_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "ask", interrupt)
    assert demo.main() == 130


@pytest.mark.usefixtures("fake_vllm")
def test_a_refused_request_fails_with_the_servers_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"a request failed .*400"):
        demo.run_arms([demo.Arm("x", ("--refuse",))], ["a"], tmp_path, cuda=False)


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("cuda", [False, True])
def test_all_servers_start_at_once_on_a_gpu_alone(
    cuda: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.run_arms([demo.Arm("x", ()), demo.Arm("y", ())], ["a"], tmp_path, cuda=cuda)
    lines = capsys.readouterr().out.splitlines()
    starts = [index for index, line in enumerate(lines) if line.startswith("$ vllm")]
    assert len(starts) == 2
    assert (starts[1] < lines.index("== x ==")) is cuda
