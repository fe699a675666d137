"""The program `vllm-graft`: its help, its lists, and a reader that leaves."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from vllm_graft import bench, cli
from vllm_graft.base.text_table import Table

ORDER = [
    "doctor",
    "plan",
    "prove",
    "train",
    "learn",
    "info",
    "bench",
    "new-plugin",
    "support",
    "hooks",
    "metrics",
]


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert capsys.readouterr().out == alone
    assert re.sub(r"\s+", " ", cli.ABOUT) in re.sub(r"\s+", " ", alone)
    assert re.findall(r"^    ([a-z][\w-]*)\b", alone, re.MULTILINE) == ORDER


def test_bench_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    printed = capsys.readouterr().out
    assert all(name in printed for name in bench.BENCHMARKS)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["plan", "--help"], ["prove", "--help"], ["support"]],
    ids=" ".join,
)
def test_a_reader_that_leaves_ends_it_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        command = [sys.executable, "-m", "vllm_graft", *arguments]
        ended = subprocess.run(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            # Argparse itself hides an error of what is written at once.
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            timeout=100,
        )
    assert (ended.stderr, ended.returncode) == (b"", cli.UNREAD)


def test_another_broken_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(given: object) -> int:
        raise BrokenPipeError("of an engine's process")

    reader, writer = os.pipe()
    monkeypatch.setattr(cli, "_run", fail)
    with os.fdopen(writer, "w") as output, os.fdopen(reader):
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError, match="engine"):
            cli.main([])


@pytest.mark.parametrize("name", ["support", "hooks", "metrics"])
def test_lists_are_tables_markdown_or_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for form in ((), ("--markdown",), ("--json",)):
        assert cli.main([name, *form]) == 0
        told["".join(form)] = capsys.readouterr().out
    assert "|---|" in told["--markdown"]
    assert "`" in told["--markdown"] or name == "hooks"
    assert not re.search(r"[`|]|##", told[""])
    assert json.loads(told["--json"])


@pytest.mark.parametrize("name", ["support", "metrics"])
def test_no_line_is_longer_than_the_terminal(name: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vllm_graft", name]
    environment = {**os.environ, "COLUMNS": "90", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while piece := _read(ours):
            shown += piece
    os.close(ours)
    assert process.returncode == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()
    assert len(lines) > 60
    assert max(map(len, lines)) <= 90


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # The other side has closed it.
        return b""


def test_a_title_and_cells_lose_marks_of_code_in_text_alone() -> None:
    table = Table("Of `a`", ("`b`", "c"), [("`d`", "e")])
    assert table.text() == "Of a\nb  c\nd  e"
    assert table.markdown() == "### Of `a`\n\n| `b` | c |\n|---|---|\n| `d` | e |"
