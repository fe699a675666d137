"""The report of ``vllm-graft doctor`` and the commands, with every check faked or broken."""

import importlib.metadata
import importlib.util
import json
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from vllm_graft import cli, doctor, hookimpl
from vllm_graft.doctor import Finding
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import Health, HealthCheck, TreePolicy
from vllm_graft.hooks.manager import Manager
from vllm_graft.seams.compare import Seam, SeamReport, ledger_at, vllm_version


def _lines(findings: Iterator[Finding]) -> list[tuple[str, bool]]:
    return [(finding.check, finding.ok) for finding in findings]


@pytest.mark.parametrize(
    ("allowed", "ok"), [(None, True), ("graft", True), ("a,graft", True), ("a", False), ("", False)]
)
def test_a_blocked_entry_point(
    monkeypatch: pytest.MonkeyPatch, allowed: str | None, ok: bool
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert _lines(doctor._entry_point()) == [("entry point", True), ("VLLM_PLUGINS", ok)]


def test_a_missing_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert ("entry point", False) in _lines(doctor._entry_point())


def test_moved_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = Seam("tree", "a.b", "name", "present", "why", "until")
    monkeypatch.setattr(doctor, "check_seams", lambda: [SeamReport(seam, "nothing")])
    finding, part, support = doctor._seams()
    assert not finding.ok
    assert (part.check, part.detail) == ("tree", "1 moved: refuses to start")
    assert (support.ok, support.detail) == (False, "not supported")
    assert "vllm.a.b: expected present, found nothing" in finding.detail
    monkeypatch.setattr(doctor, "check_seams", lambda: [SeamReport(seam, "present")])
    assert _lines(doctor._seams()) == [("seams", True), ("support", True)]


def test_moved_seams_say_what_differs_and_what_may_stand_in() -> None:
    text = SeamReport(Seam("tree", "a.b", "order", "one(, two(", "why", "until"), "one(")
    name = SeamReport(Seam("vit", "a.c", "name", "present", "why", "until"), "nothing")
    tool = SeamReport(Seam("plan", "a.d", "call", "a", "why", "until"), "b")
    found = doctor._compared("0.33.0", [text, name, tool], lambda report: [f"- {report.seam.path}"])
    told = [finding.detail for finding in found]
    assert told[0] == "vllm.a.b: expected two(, found nothing in its place\n    - a.b"
    assert told[3:] == [
        "1 moved: refuses to start, unless `vllm-graft prove` passes",
        "1 moved: refuses to start",
        "1 moved: no server needs them",
        "not supported",
    ]
    # One row that nothing stands in for is enough.
    both = doctor._compared("0.33.0", [text, replace(text, found="nothing (x has no b)")])
    assert [finding.detail for finding in both][2:] == [
        "2 moved: refuses to start",
        "not supported",
    ]


class Plugin:
    """A third party's plugin with a policy and one health check."""

    def __init__(self, check: Callable[[], Any]) -> None:
        self._check = check

    @hookimpl
    def graft_tree_policies(self) -> list[TreePolicy]:
        return [TreePolicy("x", "json:loads", "")]

    @hookimpl
    def graft_health_checks(self) -> list[HealthCheck]:
        return [HealthCheck("paper", lambda: self._check, "")]


def _fail() -> Health:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("check", "ok", "detail"),
    [
        (lambda: Health(True, "fine"), True, "fine"),
        (lambda: Health(False, "buy paper"), False, "buy paper"),
        (_fail, False, "failed: RuntimeError: boom"),
        (lambda: "fine", False, "must return Health, got 'fine'"),
        (lambda: sys.exit(3), False, "failed: SystemExit: 3"),
        (lambda: Health(1, ["dry"]), True, "['dry']"),  # type: ignore[arg-type]
    ],
)
def test_health_checks(
    entry_point: Callable[..., Any], check: Callable[[], Any], ok: bool, detail: str
) -> None:
    [finding] = doctor._health(Manager([entry_point("acme", Plugin(check))]))
    assert finding.check == "paper (acme)"
    assert finding.ok is ok
    assert detail in finding.detail
    json.dumps(doctor.as_dict([finding]))


def test_duplicates_are_reported(entry_point: Callable[..., Any]) -> None:
    points = [entry_point(name, Plugin(_fail)) for name in ("acme", "zeta")]
    findings = {finding.check: finding for finding in doctor._plugins(Manager(points))}
    assert not findings["graft_tree_policies"].ok
    assert "acme 1.0 and zeta 1.0 both provide 'x'" in findings["graft_tree_policies"].detail
    assert findings["plugin"].ok


def test_a_check_that_cannot_run_is_a_finding() -> None:
    def _paper() -> Iterator[Finding]:
        yield Finding("first", True, "")
        raise RuntimeError("boom")

    first, second = doctor._guarded(_paper)
    assert first.ok
    assert second == Finding("paper", False, "could not be checked: RuntimeError: boom")


def test_the_cure_of_a_new_environment_on_a_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what vLLM's import ends in where torchvision is a build for CUDA."""

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("operator torchvision::nms does not exist")

    def within(name: str) -> Any:
        return fail() if "." in name else SimpleNamespace(__version__="1.0", main=fail)

    cure = "does not exist. On a CPU, run `python -m vllm_graft.testing.environment`"
    [finding] = doctor._guarded(fail)
    assert cure in finding.detail
    # `vllm` alone can be imported.
    monkeypatch.setattr(importlib, "import_module", within)
    findings = {finding.check: finding for finding in doctor._versions()}
    assert not findings["vllm"].ok
    assert findings["torch"].ok
    assert cure in findings["vllm"].detail
    # Other commands end in that sentence.
    with pytest.raises(SystemExit, match=re.escape(cure)):
        cli.main(["plan", "model"])
    assert importlib.util.find_spec("vllm_graft.testing.environment") is not None


@pytest.mark.parametrize("ok", [True, False])
def test_the_command_prints_and_returns_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ok: bool
) -> None:
    findings = [Finding("one", True, "1"), Finding("two", ok, "2")]
    monkeypatch.setattr(doctor, "diagnose", lambda manager: findings)
    monkeypatch.setattr(cli, "manager", lambda: Manager())
    assert cli.main(["doctor", "--json"]) == (0 if ok else 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is ok
    assert answer["findings"][1] == {"check": "two", "ok": ok, "detail": "2"}
    assert cli.main(["doctor"]) == (0 if ok else 1)
    text = capsys.readouterr().out
    assert ("PROBLEM  two" in text) is not ok


def test_hooks_command_lists_every_hook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "manager", lambda: Manager())
    assert cli.main(["hooks"]) == 0
    text = capsys.readouterr().out
    assert all(hook in text for hook in manager.COLLECTED)
    assert "dynamic" in text


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doktor"])
    assert caught.value.code == 2
    assert "doktor" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "found", "detail", "status"),
    [
        ("0.32.1+cpu", "present", "tested", 0),
        ("0.33.0", "present", "tested", 0),
        ("0.34.0", "present", "seams fit, not tested", 3),
        ("0.34.0", "nothing", "not supported", 1),
        ("0.33.0", "nothing", "not supported", 1),
        ("0.31.9", "present", "not supported", 1),
    ],
)
def test_support_and_its_exit_status(version: str, found: str, detail: str, status: int) -> None:
    seam = Seam("core", "thing", "name", "present", "why", "until")
    findings = list(doctor._compared(version, [SeamReport(seam, found)]))
    assert findings[-1].detail == detail
    assert doctor.exit_status(findings) == status


@pytest.fixture(scope="module")
def next_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pack the installed vLLM's sources into a wheel of the next minor version."""
    import vllm

    root = Path(vllm.__file__).parent
    wheel = tmp_path_factory.mktemp("wheel") / "vllm-0.34.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for source in root.rglob("*.py"):
            file.write(source, f"vllm/{source.relative_to(root).as_posix()}")
    return wheel


def test_a_wheel_of_the_next_minor_version(
    next_wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The installed vLLM is one that we know, so the entries of its own version have to fit."""
    installed = vllm_version()
    monkeypatch.setattr(doctor, "ledger_at", lambda version: ledger_at(installed))
    assert cli.main(["doctor", "--wheel", str(next_wheel)]) == 3
    assert "seams fit, not tested" in capsys.readouterr().out

    name = "vllm/v1/worker/gpu/dp_utils.py"
    with zipfile.ZipFile(next_wheel) as file:
        text = file.read(name).decode()
    moved = text.replace("def dispatch_cg_and_sync_dp(", "def dispatch_and_sync(")
    assert moved != text
    with warnings.catch_warnings(), zipfile.ZipFile(next_wheel, "a") as file:
        warnings.simplefilter("ignore", UserWarning)
        file.writestr(name, moved)
    assert cli.main(["doctor", "--wheel", str(next_wheel), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    wrong = [finding for finding in answer["findings"] if not finding["ok"]]
    assert [finding["check"] for finding in wrong] == ["seam of tree", "tree", "support"]
    assert "has no dispatch_cg_and_sync_dp" in wrong[0]["detail"]


def test_what_holds_no_vllm_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--wheel .*holds no vLLM"):
        cli.main(["doctor", "--wheel", str(tmp_path)])
