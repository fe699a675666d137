"""The seams ledger against a fake vLLM; the real one is in test_real_vllm.py."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_graft.base.errors import SeamError
from vllm_graft.seams import compare as seams
from vllm_graft.seams import form
from vllm_graft.seams.compare import Kind, Seam, SeamReport, check_seams, provable, require_seams
from vllm_graft.seams.ledger.entry import items

FakeModule = Callable[..., ModuleType]


THING = """
from dataclasses import dataclass

def upstream(first: int, *rest: int, named: int = 3) -> int:
    return first + named  # why not

class Base: ...

class Child(Base):
    def method(self, one: int, two: int = 2) -> None: ...

    @classmethod
    def maker(cls, one: int) -> None: ...

    def __init__(self) -> None:
        self.assigned = 1

@dataclass
class Fields:
    first: int
    second: int = 2

def ordered() -> None:
    upstream(1)
    Child()
"""


@pytest.fixture
def ledger(
    fake_module: FakeModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Replace the ledger by seams of the files of a ``vllm.thing``."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/thing.py").write_text(THING)
    fake_module("vllm", __version__="0.99.0", __file__=str(tmp_path / "vllm/__init__.py"))

    def use(*lines: Seam) -> None:
        monkeypatch.setattr(seams, "LEDGER", lines)

    return use


def _seam(path: str, kind: Kind, expected: str, part: str = "tree") -> Seam:
    return Seam(part, path, kind, expected, "why", "until")


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("thing.upstream", "call", "first, *rest, named="),
        ("thing.Child.method", "call", "self, one, two="),
        ("thing.Child.maker", "call", "cls, one"),
        ("thing.Child", "class", "Base"),
        ("thing.Child", "name", "present"),
        ("thing.Child", "has", "assigned, maker, method"),
        ("thing.Fields", "has", "first, second"),
        ("thing.ordered", "order", "upstream(1), Child()"),
        ("thing.ordered", "call", "no parameter"),
        ("thing.ordered", "order", "(), Child()"),
        ("thing.Child", "has", "(Base), method(self, one), maker(cls, one), assigned"),
        ("thing", "has", "Fields, upstream(first)"),
        ("thing", "module", "present"),
    ],
)
def test_as_expected(ledger: Callable[..., None], path: str, kind: Kind, expected: str) -> None:
    ledger(_seam(path, kind, expected))
    [report] = check_seams()
    assert report.ok
    assert report.problem == ""
    require_seams("tree")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("thing.upstream", "call"),
        ("thing.upstream", "source"),
        ("thing.upstream", "order"),
        ("thing.Fields", "has"),
        ("nothing", "module"),
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
        require_seams("tree")
    message = str(caught.value)
    assert "vLLM 0.99.0" in message
    assert f"vllm.{path}: expected as it was, found " in message


def test_only_the_parts_asked_for_are_checked(ledger: Callable[..., None]) -> None:
    ledger(
        _seam("thing.Child", "class", "Base", part="core"),
        _seam("gone.thing", "call", "", part="vision"),
    )
    assert [report.ok for report in check_seams(["core"])] == [True]
    assert [report.ok for report in check_seams()] == [True, False]
    require_seams("core")
    with pytest.raises(SeamError):
        require_seams("core", "vision")


def test_a_source_hash_ignores_comments_and_indentation() -> None:
    plain = form.normalized_hash("def f():\n    return 1\n")
    assert form.normalized_hash("    def f():\n        # a comment\n\n        return 1\n") == plain
    assert form.normalized_hash("def f():\n    return 2\n") != plain


def test_the_ledger_lists_each_symbol_once_and_says_why() -> None:
    rows = [(seam.part, seam.path, seam.kind) for seam in seams.LEDGER]
    assert len(set(rows)) == len(rows)
    parts = "core engine tree mtp gemma4 ngram block recurrent draft vit fused pixtral kimi hicache"
    parts += " native metrics plan bench testing train learn"
    assert {seam.part for seam in seams.LEDGER} == {*parts.split()}
    assert all(seam.why and seam.until and seam.expected for seam in seams.LEDGER)


@pytest.mark.parametrize(
    ("path", "kind", "expected", "told"),
    [
        ("Child", "has", "assigned, gone, method", "expected gone, found nothing in its place"),
        ("Fields", "has", "first, third", "expected third, found nothing in its place"),
        ("Child", "has", "method(self)", "expected method(self), found method(self, one)"),
        ("ordered", "order", "Child(), upstream(1)", "expected upstream(1), found nothing in"),
        ("ordered", "order", "upstream(1), gone(, Child()", "expected gone(, found nothing in"),
        ("ordered", "order", "(one), upstream(1)", "expected (one), found ()"),
        ("Gone", "has", "first", "expected it, found nothing ("),
    ],
)
def test_the_piece_that_differs_is_told(
    ledger: Callable[..., None], path: str, kind: Kind, expected: str, told: str
) -> None:
    ledger(_seam(f"thing.{path}", kind, expected))
    with pytest.raises(SeamError, match=re.escape(told)):
        require_seams("tree")


@pytest.mark.parametrize(
    ("found", "wanted", "fits"),
    [
        ("self, a, b=", "self, a", True),  # An option that nobody passes.
        ("self, a, *more, **rest", "self, a", True),
        ("self, a, c=, b=", "self, a, b=", True),
        ("self, a=", "self, a", True),  # It may be left out, and is not.
        ("self, a, b", "self, a", False),  # Nobody passes what is required.
        ("self, b, a", "self, a, b", False),
        ("self, a", "self, a, b=", False),
        ("self, other", "self, a", False),
        ("self, a", "self, a, no other", True),
        ("self, a, b=", "self, a, no other", False),  # Ours would not know it.
        ("self, a=", "self, a, no other", False),
    ],
)
def test_parameters_that_fit(found: str, wanted: str, fits: bool) -> None:
    expected = wanted.split(", ")
    assert (form.fitting(found.split(", "), expected) == expected) is fits


@pytest.mark.parametrize(
    ("kind", "expected", "found", "stands"),
    [
        ("source", "(a), 0123", "(a), 4567", True),
        ("order", "(a), one(, two(", "(a), one(", True),
        ("order", "one(, two(", "", True),
        ("order", "one(", "one(", False),  # Nothing has moved.
        ("source", "(a), 0123", "(b), 4567", False),
        ("order", "(a), one(", "(a, b)", False),
        ("order", "one(", "nothing (vllm.x has no y)", False),
        ("source", "0123", "unknown: no function", False),
        ("has", "one, two", "one", False),
        ("call", "a", "b", False),
        ("class", "A", "B", False),
        ("name", "present", "nothing", False),
    ],
)
def test_a_proof_stands_in_for_texts_alone(
    kind: Kind, expected: str, found: str, stands: bool
) -> None:
    assert provable(SeamReport(_seam("x", kind, expected), found)) is stands


def test_a_source_hash_ignores_what_does_nothing() -> None:
    plain = form.normalized_hash("def f(a, b=1):\n    x = a\n    return f'{x}'\n")
    typed = """def f(a: int, b: int = 1) -> str:
        '''Says it.'''
        x: int = (
            a  # why not
        )
        return f'so {x}'
    """
    assert form.normalized_hash(typed) == plain
    assert form.normalized_hash(typed.replace("= 1", "= 2")) != plain


# These names only look like modules of vLLM.
NO_MODULES = {"vllm.general_plugins", "vllm.graft", "vllm.logits_processors"}


def _named_symbols(source: str) -> set[str]:
    """Return paths below ``vllm.`` that a source imports or names in a string."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.update(re.findall(r"^vllm(?:\.\w+)+$", node.value))
    return {name.removeprefix("vllm.") for name in found - NO_MODULES if name.startswith("vllm.")}


def _unlisted(names: set[str]) -> set[str]:
    paths = [seam.path for seam in seams.LEDGER]
    for seam in seams.LEDGER:
        if seam.kind == "has":
            paths += [f"{seam.path}.{item.partition('(')[0]}" for item in items(seam.expected)]
    return {n for n in names if not any(p == n or p.startswith(f"{n}.") for p in paths)}


def test_the_ledger_lists_what_our_sources_import() -> None:
    root = Path(__file__).parents[3]
    sources = [
        file
        for folder in ("plugin", "spec_decode", "graph_runners", "hicache")
        for file in sorted((root / folder).rglob("*.py"))
    ]
    assert len(sources) > 40
    names = set().union(*(_named_symbols(file.read_text()) for file in sources))
    assert len(names) > 50
    assert _unlisted(names) == set()


def test_an_unlisted_import_is_noticed() -> None:
    source = (
        "def f():\n    from vllm.v1.gone import Thing\nX = 'vllm.v1.other.Thing'\nimport vllm.x"
    )
    assert _named_symbols(source) == {"v1.gone.Thing", "v1.other.Thing", "x"}
    assert _unlisted({"v1.gone.Thing", "config.VllmConfig"}) == {"v1.gone.Thing"}


def test_a_report_is_ok_only_when_equal() -> None:
    seam = _seam("x", "name", "present")
    assert SeamReport(seam, "present").ok
    assert not SeamReport(seam, "nothing").ok
