"""A `vllm serve` process: start it, wait for it, read its metrics, stop it."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from vllm_graft.metrics.server_info import total

# What the `vllm` command runs; named this way it is always that of this interpreter. `-P` keeps
# the current folder, where `plugin` and `spec_decode` would be importable, off sys.path.
VLLM = (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main")

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request; the message holds its log's end."""


@dataclass(frozen=True)
class SpecDecodeCounters:
    """Sums of vLLM's `vllm:spec_decode_*` counters: steps with a draft, draft tokens accepted."""

    drafts: int = 0
    accepted: int = 0

    @classmethod
    def parse(cls, metrics: str) -> SpecDecodeCounters:
        """Read the counters out of Prometheus text; a counter that is absent is zero."""
        return cls(
            drafts=int(total(metrics, "vllm:spec_decode_num_drafts_total")),
            accepted=int(total(metrics, "vllm:spec_decode_num_accepted_tokens_total")),
        )

    def __sub__(self, earlier: SpecDecodeCounters) -> SpecDecodeCounters:
        return SpecDecodeCounters(self.drafts - earlier.drafts, self.accepted - earlier.accepted)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a verification step, the target's own included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


def free_port() -> int:
    """Return a TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _hear_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class VllmServer:
    """Context manager around one server process; leaving it stops the process.

    Args:
        arguments: what follows `vllm serve`, without host and port.
        environment: variables added to this process's.
        command: what to run in place of `vllm`.
        report: takes one line of progress at a time.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] = VLLM,
        report: Callable[[str], None] = print,
    ) -> None:
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.report = report
        # A proxy of the environment must not see the loopback interface, and certificates take 30
        # milliseconds to read, at each look at a server that starts.
        self._client = httpx.Client(trust_env=False, verify=False, timeout=10)
        self._arguments = ["serve", *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self._command = [*command, *self._arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        if self._process is not None:
            return self
        self.report("$ vllm " + shlex.join(self._arguments))
        with self.log.open("wb") as output:
            # A session of its own: Ctrl-C reaches this program only, which then stops the server
            # in order, and the engine's processes can be told apart to be killed.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A program in a shell's background is born deaf to SIGINT, and its children too.
                preexec_fn=_hear_sigint,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_ready(self, timeout: float = 300, every: float = 5) -> None:
        """Poll /health; report what the log says last each `every` seconds.

        Raises:
            ServerError: the process ended, or `timeout` seconds went by.
        """
        begin = reported = time.monotonic()
        while not self._healthy():
            now = time.monotonic()
            if self._ended():
                raise self.failure(f"the server ended while starting, exit code {self.exit_code}")
            if now - begin > timeout:
                raise self.failure(f"the server was not ready after {timeout:.0f} s")
            if now - reported >= every:
                reported = now
                self.report(f"  {now - begin:3.0f} s  {self.last_line()[:110]}")
            time.sleep(0.2)
        self.report(f"  ready after {time.monotonic() - begin:.0f} s")

    def metrics(self) -> str:
        return self._get("/metrics")

    def counters(self) -> SpecDecodeCounters:
        return SpecDecodeCounters.parse(self.metrics())

    def stop(self, timeout: float = 20) -> None:
        """Interrupt the server, wait `timeout` seconds, then kill whatever is left of it."""
        if self._process is None:
            return
        if not self._ended():
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def exit_code(self) -> int | None:
        """The process's exit code; None before its start and while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def group(self) -> int:
        """The process group of all processes of the server; 0 before its start."""
        return 0 if self._process is None else self._process.pid

    def last_line(self) -> str:
        """Return the log's last line that is not blank, without colours."""
        return next((line for line in reversed(self.tail(20)) if line.strip()), "")

    def tail(self, count: int) -> list[str]:
        """Return the log's last `count` lines, without colours."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return ANSI.sub("", text).splitlines()[-count:]

    def failure(self, what: str) -> ServerError:
        """Return an error that says `what` and shows the end of the log."""
        return ServerError("\n".join([f"{what}; the end of {self.log}:", *self.tail(40)]))

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _healthy(self) -> bool:
        try:
            self._get("/health")
        except httpx.HTTPError:
            return False
        return True

    def _get(self, path: str) -> str:
        return self._client.get(self.address + path).raise_for_status().text
