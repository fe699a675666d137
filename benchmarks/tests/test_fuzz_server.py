"""The fuzz from end to end with a stand-in for `vllm`: its findings, and its report."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.fuzz import growth, kill, trouble
from benchmarks.fuzz import server as fuzz_server
from benchmarks.fuzz.answers import Answer, Choice, Raw
from benchmarks.fuzz.arms import ARMS, PLAIN, Arm, Life, arm, settings
from benchmarks.fuzz.compare import Judge
from benchmarks.fuzz.requests import CHAT, COMPLETIONS, FuzzRequest, World, generate
from benchmarks.fuzz.rules import STOCK_CHAIN
from benchmarks.fuzz.targets import TARGETS

pytestmark = pytest.mark.slow

# Stands in for `vllm`: each answer is a function of the request, in the form of a completion or a
# chat, in one piece or streamed. `--wrong N` answers N's request with another token; `--refuse N`
# with an error. `--keep`, `--chatty`, `--threads` and `--slow` let it grow, or take long, with each
# large request; a request to `/sleep` is refused. `--ranks N` gives it two ranks: once one is
# gone it ends (1), does not answer any more (2), or goes on (3).
FAKE = """
import json, os, subprocess, sys, threading, time, zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
arguments = sys.argv[1:]
def number(flag):
    return int(arguments[arguments.index(flag) + 1]) if flag in arguments else 0
kept = []
def note(**line):
    with open(os.environ["VLLM_GRAFT_FUZZ_STEPS"], "a") as file:
        print(json.dumps(line), file=file)
def grow(text, name):
    if number("--keep"):
        kept.append(text.encode())
    if number("--chatty"):
        print(text[:50_000], flush=True)
    if number("--threads"):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if number("--slow"):
        note(call="Fake.add_request", ms=5.5, request=f"cmpl-{name}-0")
def end(rank):
    global hangs
    rank.wait()
    if number("--ranks") == 1:
        os._exit(1)
    hangs = number("--ranks") == 2
hangs = False
if number("--ranks"):
    for n in range(2):
        title = f"VLLM::EngineCore_DP{n}"
        rank = subprocess.Popen([title, "60"], executable="/bin/sleep")
        threading.Thread(target=end, args=(rank,), daemon=True).start()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b'vllm:work_total{a="b"} %d\\n' % (not number("--lazy")))
    def head(self, status, kind):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()
    def do_POST(self):
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        if self.path.startswith("/sleep"):
            self.head(404, "text/plain")
            return
        if not self.path.startswith("/v1"):
            self.head(200, "application/json")
            self.wfile.write(b'{"success": true, "version": 1}')
            return
        if len(text) > 20_000:
            grow(text, self.headers["x-request-id"])
        try:
            body = json.loads(text)
        except ValueError:
            body = None
        time.sleep(0.01 if number("--ranks") else 0)
        while hangs:
            time.sleep(1)
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
if not number("--unwatched"):
    note(watched="Fake.add_request")
try:
    ThreadingHTTPServer(("127.0.0.1", number("--port")), Handler).serve_forever()
except KeyboardInterrupt:
    pass
"""

BUSY = ("vllm:work_total",)
FAKES = {
    each.name: each
    for each in (
        arm("right", busy=BUSY, troubles=("reset", "metrics", "broken body")),
        arm("wrong", ["--wrong", "100"]),
        arm("lazy", ["--lazy", "1"], busy=BUSY),
        arm("refusing", ["--refuse", "100"]),
        arm("asleep", troubles=("sleep",)),
        arm("stopping", ["--refuse", "no number"]),
        arm("ending", ["--ranks", "1"]),
        arm("hanging", ["--ranks", "2"]),
        arm("staying", ["--ranks", "3"]),
        arm("ending wrong", ["--ranks", "1", "--wrong", "500"]),
        Arm("lives", (Life(), Life(target="noisy", reload=True), Life((["--wrong", "100"],)))),
        *(
            arm(name, [f"--{name}", "1"])
            for name in ("keep", "chatty", "threads", "slow", "unwatched")
        ),
    )
}


@pytest.fixture
def fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the flags of a run against the stand-in."""
    script = tmp_path / "fake_vllm.py"
    script.write_text(FAKE)
    monkeypatch.setattr(fuzz_server, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(fuzz_server, "ARMS", FAKES)
    monkeypatch.setattr(trouble, "SECONDS", 0.01)
    return ["--requests", "80", "--flood", "0", "--out", str(tmp_path / "out")]


@pytest.fixture
def told(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the lines of a run with `--log`."""
    return lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


Told = Callable[[], list[dict[str, Any]]]


def test_a_run_without_differences_succeeds(fuzz: list[str], tmp_path: Path, told: Told) -> None:
    assert fuzz_server.main([*fuzz, "--arm", "right", "--log", str(tmp_path / "log")]) == 0
    (line,) = told()
    assert (line["arm"], line["requests"], line["unexplained"]) == ("right", 80, 0)
    assert line["rules"]["equal"] > 60
    assert line["per_minute"] > 0
    assert line["troubles"]
    assert line["troubles"].keys() <= {"reset", "metrics", "broken body"}
    assert json.loads((tmp_path / "out" / "right.json").read_text()) == {}


@pytest.mark.parametrize("arm", ["wrong", pytest.param("refusing", marks=pytest.mark.nightly)])
def test_a_wrong_answer_fails_the_run_and_is_written_down(
    fuzz: list[str], tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], arm: str
) -> None:
    assert fuzz_server.main([*fuzz, "--arms", "right", arm, "--log", str(tmp_path / "log")]) == 1
    assert "UNEXPLAINED" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / f"{arm}.json").read_text())
    assert [line["unexplained"] for line in told()] == [0, len(written)]
    first = next(iter(written))
    assert written[first]["request"]["number"] == int(first)
    # Sending that request alone shows the fault again.
    assert fuzz_server.main([*fuzz, "--arms", arm, "--only", first]) == 1


def test_a_life_is_compared_with_its_own_target(
    fuzz: list[str], tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz_server.main([*fuzz, "--arms", "lives", "--log", str(tmp_path / "log")]) == 1
    assert [(line["arm"], line["unexplained"] > 0) for line in told()] == [
        ("lives.0", False),
        ("lives.1", False),
        ("lives.2", True),
    ]
    started = [line for line in capsys.readouterr().out.splitlines() if line.startswith("$ vllm")]
    # Weights are replaced in the first life's server, beside a reference that starts with them.
    assert ["noisy" in line.split()[3] for line in started] == [False, False, True, False]


GROWN = {
    "keep": "flood_mib is",
    "chatty": "flood_log_bytes is",
    "threads": "threads is",
    "slow": "Fake.add_request for ['flood', 'predicted ids'] took 5.5 ms of CPU",
    "unwatched": "nothing measured the time of a step",
}
"""Arms that a flood leaves something behind in, and what is said of each."""


def test_what_grows_or_takes_long_fails_the_run(
    fuzz: list[str], tmp_path: Path, told: Told
) -> None:
    """A flood that leaves nothing behind is fine."""
    flags = ["--requests", "3", "--flood", "5", "--log", str(tmp_path / "log")]
    assert fuzz_server.main([*fuzz, *flags, "--arms", "right", *GROWN]) == 1
    fine, *lines = told()
    assert fine["figures"].keys() == growth.LIMITS.keys()
    assert fine["broken"] == []
    for line in lines:
        assert any(each.startswith(GROWN[line["arm"]]) for each in line["broken"])
    assert [line["arm"] for line in lines if not line["unexplained"]] == [*GROWN]


def test_a_disturbance_that_is_refused_fails_the_run(
    fuzz: list[str], tmp_path: Path, told: Told
) -> None:
    log = ["--log", str(tmp_path / "log")]
    assert fuzz_server.main([*fuzz, "--arms", "asleep", *log]) == 1
    assert told()[0]["broken"][0].startswith("sleep: POST /sleep?level=1&mode=keep: 404")


def test_answers_that_are_altered_on_purpose_are_found(fuzz: list[str]) -> None:
    assert fuzz_server.main([*fuzz, "--arm", "right", "--corrupt", "100"]) == 1


KILLED = {
    "hanging": "the last request ended",
    "staying": "the kill has ended no request",
    "right": "there are 0 ranks to kill one of",
}
"""Arms of which a rank is killed in vain, and what is said of each."""


@pytest.mark.nightly
def test_requests_end_when_a_rank_is_killed(
    fuzz: list[str], tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kill, "SECONDS", 1.0)
    monkeypatch.setattr(kill, "HANG_SECONDS", 2.0)
    flags = [*fuzz, "--kill", "20", "--log", str(tmp_path / "log")]
    assert fuzz_server.main([*flags, "--arms", "ending"]) == 0
    assert fuzz_server.main([*flags, "--arms", "ending wrong", *KILLED]) == 1
    fine, wrong, *broken = told()
    assert fine["rules"]["ended by the kill"] > 40
    assert fine["rules"]["equal"] >= 10
    assert wrong["unexplained"] > 0
    for line in broken:
        assert any(each.startswith(KILLED[line["arm"]]) for each in line["broken"])
    assert [line["arm"] for line in broken] == [*KILLED]


def test_an_arm_that_did_not_do_its_work_fails(fuzz: list[str], tmp_path: Path, told: Told) -> None:
    assert fuzz_server.main([*fuzz, "--arms", "lazy", "--log", str(tmp_path / "log")]) == 1
    assert told()[0]["broken"] == ["vllm:work_total is 0"]


def test_an_arm_that_does_not_start_fails(fuzz: list[str]) -> None:
    assert fuzz_server.main([*fuzz, "--arms", "stopping", "--requests", "3"]) == 1


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
    flags = {name: arm.flags(tmp_path) for name, arm in ARMS.items()}
    # Values that are paths may have any name in them.
    keys = {name: {flag for flag in each if flag.startswith("--")} for name, each in flags.items()}
    texts = {name: " ".join(each) for name, each in flags.items()}
    assert keys["chain"] == {"--speculative-config"}
    assert PLAIN.flags(tmp_path) == []
    for name in ("tree", "auto", "tree-ngram", "ngram", "draft-model", "both-async", "disturbed"):
        assert '"graft": {"tree"' in texts[name]
    for method in ("ngram_gpu", "draft_model"):
        assert sum(f'"method": "{method}"' in each for each in texts.values()) == 1
    for name in ("host-async", "host-layerwise", "both-async", "both-layerwise", "multi"):
        assert '"backend": "segments"' in texts[name]
    assert texts["multi"].count('"HiCacheConnector"') == 2
    assert '"load": "layerwise"' in texts["both-layerwise"]
    assert '"graft": "auto"' in texts["preset"]
    assert "--api-server-count" in keys["preset"]
    assert texts["ranks"].endswith("--tensor-parallel-size 2")
    assert "--data-parallel-size 2" in texts["replicas"]
    shared, environment = settings()
    assert "priority" in shared
    assert environment["VLLM_GRAFT_INTERPRET"] == "1"


def test_lives_change_weights_and_flags_on_one_storage(tmp_path: Path) -> None:
    weights, flags = ARMS["weights"].lives, ARMS["flags"].lives
    assert any(life.reload for life in weights)
    assert {life.target for life in weights} == {"pair", "noisy", "rotated"}
    # A reload is followed by a start on the weights that were there before.
    after = [b for a, b in itertools.pairwise(weights) if a.reload]
    assert [(life.target, life.reload) for life in after] == [("pair", False)]
    stores = {json.dumps(str(tmp_path / "store")) in " ".join(b.flags(tmp_path)) for b in flags}
    assert stores == {True}
    assert len({" ".join(life.flags(tmp_path)) for life in flags}) == 4


def test_every_disturbance_comes_and_targets_differ(tmp_path: Path) -> None:
    assert {name for arm in ARMS.values() for name in arm.troubles} == set(trouble.TROUBLES)
    made = {name: target.flags(tmp_path) for name, target in TARGETS.items()}
    assert len({" ".join(each) for each in made.values()}) == len(made)
    assert {life.target for arm in ARMS.values() for life in arm.lives} == set(made)
    a, b = (load_file(Path(made[name][0]) / "model.safetensors") for name in ("pair", "noisy"))
    assert a.keys() == b.keys()
    assert not torch.equal(a["lm_head.weight"], b["lm_head.weight"])


def test_arms_share_the_flags_of_the_reference() -> None:
    assert settings()[0] == settings()[0]
    assert all(arm.busy for arm in ARMS.values())
