"""The report of ``vllm-graft doctor`` and the commands, with every check faked or broken."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_graft import cli, doctor, hookimpl
from vllm_graft.doctor import Finding
from vllm_graft.hooks import manager
from vllm_graft.hooks.entries import Health, HealthCheck, TreePolicy
from vllm_graft.hooks.manager import Manager
from vllm_graft.seams.compare import Seam, SeamReport


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
    [finding] = doctor._seams()
    assert not finding.ok
    assert "vllm.a.b: expected present, found nothing" in finding.detail
    monkeypatch.setattr(doctor, "check_seams", lambda: [SeamReport(seam, "present")])
    assert _lines(doctor._seams()) == [("seams", True)]


class Plugin:
    """A third party with a policy and one health check."""

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
