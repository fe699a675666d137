import os
import signal
import sys
import textwrap
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.engines.vllm_server import ServerError, SpecDecodeCounters, VllmServer
from vllm_graft.metrics.server_info import total

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="pair"} 12.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="pair"} 8.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="pair"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="pair"} 300.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="pair"} 3e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 17.0
"""

# A stand-in for `vllm`: `serve ... --port N` answers /health after `delay` seconds.
FAKE = """
import signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
mode = sys.argv[1]
print("\\x1b[32mINFO\\x1b[0m loading", flush=True)
if mode == "crash":
    print("the reason why", flush=True)
    sys.exit(3)
if mode == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b'vllm:spec_decode_num_drafts_total{a="b"} 4.0\\n'
                             b'vllm:spec_decode_num_accepted_tokens_total{a="b"} 6.0\\n')
    def log_message(self, *arguments):
        pass
time.sleep(60 if mode == "slow" else 0.5)
try:
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
except KeyboardInterrupt:
    print("shut down in order", flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    script = tmp_path / "fake_vllm.py"
    script.write_text(textwrap.dedent(FAKE))
    return script


def server(fake: Path, mode: str, lines: list[str] | None = None) -> VllmServer:
    report = [] if lines is None else lines
    command = (sys.executable, str(fake), mode)
    return VllmServer(["model"], fake.with_name("log"), command=command, report=report.append)


def pid_of(running: VllmServer) -> int:
    assert running._process is not None
    return running._process.pid


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_counter_is_summed_over_label_sets_and_taken_by_its_whole_name() -> None:
    assert total(METRICS, "vllm:spec_decode_num_drafts_total") == 20
    assert total(METRICS, "vllm:spec_decode_num_drafts") == 0


def test_acceptance_length_counts_the_targets_own_token() -> None:
    counters = SpecDecodeCounters.parse(METRICS)
    assert counters == SpecDecodeCounters(drafts=20, accepted=30)
    assert counters.acceptance_length == 2.5
    assert (counters - SpecDecodeCounters(10, 25)).acceptance_length == 1.5


def test_no_acceptance_length_without_drafts() -> None:
    assert SpecDecodeCounters.parse("").acceptance_length is None


def test_a_server_is_waited_for_asked_and_interrupted(fake: Path) -> None:
    lines: list[str] = []
    with server(fake, "serve", lines) as running:
        running.wait_ready(timeout=30, every=0)
        assert running.counters() == SpecDecodeCounters(4, 6)
    assert running.exit_code == 0
    assert running.last_line() == "shut down in order"
    assert lines[0].startswith("$ vllm serve model --host 127.0.0.1 --port ")
    assert any(line.endswith("INFO loading") for line in lines), "colours stay out of the progress"
    assert lines[-1].startswith("  ready after ")


def test_a_server_that_dies_is_reported_with_its_log(fake: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"(?s)exit code 3.*the reason why"),
        server(fake, "crash") as running,
    ):
        running.wait_ready(timeout=30)


def test_a_server_that_never_gets_ready_is_reported_and_stopped(fake: Path) -> None:
    with pytest.raises(ServerError, match="not ready after 1 s"), server(fake, "slow") as running:
        running.wait_ready(timeout=1)
    assert not alive(pid_of(running))


def test_a_server_that_ignores_the_interrupt_is_killed(fake: Path) -> None:
    with server(fake, "deaf") as running:
        running.wait_ready(timeout=30)
        running.stop(timeout=0.2)
    assert running.exit_code == -signal.SIGKILL


def test_a_child_that_outlives_the_server_is_killed(fake: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "child"
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
    )
    with VllmServer([], tmp_path / "log", command=(sys.executable, str(script))) as running:
        with pytest.raises(ServerError, match="exit code 0"):
            running.wait_ready(timeout=30)
        child = int(pid_file.read_text())
        assert alive(child)
    for _ in range(50):
        # A killed orphan stays visible until init has collected it.
        if not alive(child) or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child is still there")


def test_an_interrupted_program_stops_its_server(fake: Path) -> None:
    with suppress(KeyboardInterrupt), server(fake, "serve") as running:
        running.wait_ready(timeout=30)
        raise KeyboardInterrupt
    assert running.exit_code == 0


def test_a_proxy_of_the_environment_is_not_asked(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert urllib.request.getproxies()["http"].endswith(":9")
    with server(fake, "serve") as running:
        running.wait_ready(timeout=30)
