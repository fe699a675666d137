"""The seams ledger against a fake vLLM; the real one is in test_real_vllm.py."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType

import pytest

from vllm_graft import seams
from vllm_graft.errors import SeamError
from vllm_graft.seams import Kind, Seam, SeamReport, check_seams, require_seams

FakeModule = Callable[..., ModuleType]


def _upstream(first: int, *rest: int, named: int = 3) -> int:
    """A body whose hash is taken."""
    return first + named  # why not


class _Child(dict[str, int]):
    def method(self, one: int, two: int = 2) -> None: ...

    @classmethod
    def maker(cls, one: int) -> None: ...


@pytest.fixture
def ledger(fake_module: FakeModule, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the ledger by seams of a fake ``vllm.thing``."""
    root = fake_module("vllm", __version__="0.99.0", __path__=[])
    root.thing = fake_module("vllm.thing", Child=_Child, upstream=_upstream)  # type: ignore[attr-defined]

    def use(*lines: Seam) -> None:
        monkeypatch.setattr(seams, "LEDGER", lines)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm.thing" or None)
    return use


def _seam(path: str, kind: Kind, expected: str, part: str = "eagle") -> Seam:
    return Seam(part, path, kind, expected, "why", "until")


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("thing.upstream", "call", "first, *rest, named="),
        ("thing.Child.method", "call", "self, one, two="),
        ("thing.Child.maker", "call", "cls, one"),
        ("thing.Child", "class", "dict"),
        ("thing.Child", "name", "present"),
    ],
)
def test_as_expected(ledger: Callable[..., None], path: str, kind: Kind, expected: str) -> None:
    ledger(_seam(path, kind, expected))
    [report] = check_seams()
    assert report.ok
    assert report.problem == ""
    require_seams("eagle")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("thing.upstream", "call"),
        ("thing.upstream", "source"),
        ("thing.Child", "class"),
        ("thing.Child.gone", "name"),
        ("thing.gone", "call"),
        ("gone.thing", "call"),
        ("thing.Child.method.deeper", "call"),
    ],
)
def test_moved(ledger: Callable[..., None], path: str, kind: Kind) -> None:
    ledger(_seam(path, kind, "as it was"))
    with pytest.raises(SeamError) as caught:
        require_seams("eagle")
    message = str(caught.value)
    assert "vLLM 0.99.0" in message
    assert f"vllm.{path}: expected as it was, found " in message


def test_only_the_parts_asked_for_are_checked(ledger: Callable[..., None]) -> None:
    ledger(
        _seam("thing.Child", "class", "dict", part="core"),
        _seam("gone.thing", "call", "", part="vision"),
    )
    assert [report.ok for report in check_seams(["core"])] == [True]
    assert [report.ok for report in check_seams()] == [True, False]
    require_seams("core")
    with pytest.raises(SeamError):
        require_seams("core", "vision")


def test_a_source_hash_ignores_comments_and_indentation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hashed(source: str) -> str:
        monkeypatch.setattr(inspect, "getsource", lambda function: source)
        return seams._source_hash(None)

    plain = hashed("def f():\n    return 1\n")
    assert hashed("    def f():\n        # a comment\n\n        return 1\n") == plain
    assert hashed("def f():\n    return 2\n") != plain


def test_the_ledger_lists_each_symbol_once_and_says_why() -> None:
    paths = [seam.path for seam in seams.LEDGER]
    assert len(set(paths)) == len(paths)
    assert {seam.part for seam in seams.LEDGER} == {"core", "eagle"}
    assert all(seam.why and seam.until and seam.expected for seam in seams.LEDGER)


def test_a_report_is_ok_only_when_equal() -> None:
    seam = _seam("x", "name", "present")
    assert SeamReport(seam, "present").ok
    assert not SeamReport(seam, "nothing").ok
