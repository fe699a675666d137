"""The ledger's check from source files alone: the installed vLLM, and one with a moved symbol."""

import copy
import importlib.util
import runpy
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.doctor import difference
from vllm_graft.seams import versions
from vllm_graft.seams.compare import SeamReport, ledger_at, provable, read_seams, vllm_version
from vllm_graft.seams.ledger.entry import Kind, Seam, minor_of, seams
from vllm_graft.seams.sources import Sources

FILES = {
    "__init__.py": "from .version import __version__\n",
    "version.py": '__version__ = "0.34.0"\n',
    "config/__init__.py": "from vllm.config.cache import *\nfrom .cache import Cache as Store\n",
    "config/cache.py": """
from dataclasses import dataclass

class Base(nn.Module):
    size: int = 3

@dataclass
class Cache(Base):
    path: str
    limit: int = 4

    def read(self, key, *more, strict=False, **rest):
        # A comment.
        self.last = key
        first(key)
        return second(key)
""",
    "lazy.py": 'TABLE = {"LLM": ".config.cache:Cache"}\n',
    "maybe.py": "try:\n    import x\nexcept ImportError:\n    def fallback(a, b=1): ...\n",
}


def made_up(folder: Path, **changed: str) -> Path:
    """Make a wheel of these files."""
    wheel = folder / "vllm-0.34.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in {**FILES, **changed}.items():
            file.writestr(f"vllm/{name}", text)
        file.writestr("vllm/native.so", b"\0\xff")
    return wheel


def read(wheel: Path, path: str, kind: Kind, expected: str) -> str:
    [report] = read_seams([Seam("core", path, kind, expected, "why", "until")], Sources(wheel))
    return report.found


@pytest.mark.parametrize(
    ("path", "kind", "found"),
    [
        ("config.cache", "module", "present"),
        ("config.disk", "module", "nothing"),
        ("__version__", "name", "present"),
        ("config.Store", "class", "Base"),
        ("config.cache.Base", "class", "Module"),
        ("config.Cache", "call", "size=, path, limit="),
        ("config.Cache.read", "call", "self, key, *more, strict=, **rest"),
        ("config.Cache.size", "name", "present"),
        ("lazy.LLM.read", "name", "present"),
        ("maybe.fallback", "call", "a, b="),
        ("config.Cache", "has", "(Base), limit, last, read(self, key)"),
        ("config", "has", "Store, Base"),
        ("config.Cache.read", "order", "(self, key, strict=), first(key), second(key)"),
    ],
)
def test_what_a_file_tells(tmp_path: Path, path: str, kind: Kind, found: str) -> None:
    assert read(made_up(tmp_path), path, kind, found) == found


def test_members_that_moved(tmp_path: Path) -> None:
    wheel = made_up(tmp_path)
    for path, expected, found in (
        ("config", "Store, Gone", "Store"),
        ("config.Cache", "(Store), read(self, key, *more, strict=, no other)", "(Base), read("),
        ("config.Cache", "read(self, other)", "read(self, key)"),
    ):
        told = read(wheel, path, "has", expected)
        assert told.startswith(found)
        assert told != expected


def test_a_symbol_that_is_gone(tmp_path: Path) -> None:
    wheel = made_up(tmp_path)
    for path in ("config.cache.Gone", "config.Cache.write", "nowhere.Cache"):
        assert read(wheel, path, "name", "present").startswith("nothing (")


def test_texts_in_their_order(tmp_path: Path) -> None:
    wheel = made_up(tmp_path)
    path = "config.cache.Cache.read"
    assert read(wheel, path, "order", "first(, second(") == "first(, second("
    assert read(wheel, path, "order", "second(, first(") == "second("


def test_members_of_a_foreign_base_are_not_guessed(tmp_path: Path) -> None:
    wheel = made_up(tmp_path)
    assert read(wheel, "config.Cache", "has", "last, limit, size") == "last, limit, size"
    found = read(wheel, "config.Cache", "has", "limit, forward")
    assert found == "unknown: forward may be members of Module"


def test_a_source_s_hash_ignores_comments_alone(tmp_path: Path) -> None:
    path, text = "config.cache.Cache.read", FILES["config/cache.py"]
    first = read(made_up(tmp_path), path, "source", "")
    comment = text.replace("A comment", "Another")
    assert read(made_up(tmp_path, **{"config/cache.py": comment}), path, "source", "") == first
    other = text.replace("first(key)", "first(self)")
    assert read(made_up(tmp_path, **{"config/cache.py": other}), path, "source", "") != first


def test_a_difference_is_of_the_text(tmp_path: Path) -> None:
    """It is what the ledger fits against the other; there is none of what is the same or gone."""
    text = FILES["config/cache.py"]
    sides = [tmp_path / name for name in ("known", "other")]
    for side in sides:
        side.mkdir()
    known = Sources(made_up(sides[0]))
    changed = text.replace("first(key)", "start(key)").replace("limit", "most")
    other = Sources(made_up(sides[1], **{"config/cache.py": changed}))
    cases: list[tuple[str, Kind, str]] = [
        ("read", "order", "first(, second("),
        ("read", "call", "self, key"),
        ("read", "order", "(self), first("),
    ]
    rows = [Seam("core", f"config.Cache.{name}", kind, form, "", "") for name, kind, form in cases]
    rows += [Seam("core", "config.cache", "has", "Base, Gone", "", "")]
    rows += [Seam("core", "config.Gone", "order", "first(", "", "")]
    told = [difference(report, known, other) for report in read_seams(rows, other)]
    body = ["     self.last = key", "-    first(key)", "+    start(key)", "     return second(key)"]
    assert told[0][1:] == body
    assert told[1] == []
    assert told[2] == ["- (self)", "+ (self, key)"]
    assert told[3:] == [["- Gone"], []]
    [without, *_] = (difference(report, None, other) for report in read_seams(rows, other))
    assert without == ["- first("]


def test_a_replay_counts_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = runpy.run_path(str(Path(__file__).parents[3] / ".ci" / "replay.py"))
    text = FILES["config/cache.py"]
    rows = [
        Seam("core", "config.cache", "has", "Base, New", "", ""),
        Seam("tree", "config.Cache.read", "call", "self, key", "", ""),
        Seam("tree", "config.Gone", "name", "present", "", ""),
    ]
    monkeypatch.setitem(replay["moved"].__globals__, "LEDGER", rows)
    old = Sources(made_up(tmp_path))
    versions = {
        "same": text,
        "more": text + "New = Base\n",
        "less": text.replace("Base(", "Bases(").replace("key, *more", "name"),
    }
    for name, (moved, refused) in {"same": (0, 0), "more": (1, 0), "less": (2, 2)}.items():
        (tmp_path / name).mkdir()
        new = Sources(made_up(tmp_path / name, **{"config/cache.py": versions[name]}))
        pairs = replay["moved"](old, new)
        assert (len(pairs), len(list(replay["refused"](pairs, new)))) == (moved, refused), name


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"text"])
def test_what_is_no_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "vllm-0.34.0.whl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a wheel"):
        Sources(file)


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no vLLM"):
        Sources(tmp_path)


@pytest.fixture(scope="module")
def installed() -> Sources:
    import vllm

    return Sources(Path(vllm.__file__).parents[1])


def test_the_installed_vllm_reads_as_it_imports(installed: Sources) -> None:
    """No entry is unknown or wrong: each has the form that importing finds."""
    reports = read_seams(ledger_at(vllm_version()), installed)
    assert [report.problem for report in reports if report.problem] == []
    assert not any(report.is_unknown for report in reports)


def planted(installed: Sources, module: str, text: str, instead: str) -> list[SeamReport]:
    """The ledger's rows of the module and of EAGLE, where a text of the module is replaced."""
    sources = copy.copy(installed)
    sources._trees, sources._members = {}, {}
    name, read = sources.file(module), sources._read
    assert name is not None
    assert text in read(name)
    sources._read = lambda file: read(file).replace(text, instead) if file == name else read(file)
    heads = (f"{module}.", "v1.worker.gpu.spec_decode.eagle.")
    rows = [seam for seam in ledger_at(vllm_version()) if f"{seam.path}.".startswith(heads)]
    assert rows
    return [report for report in read_seams(rows, sources) if report.problem]


CONNECTOR = "distributed.kv_transfer.kv_connector.v1.base"
EAGLE = "v1.worker.gpu.spec_decode.target_dependent_ar.speculator"


@pytest.mark.parametrize(
    ("module", "text", "instead", "told", "stands"),
    [
        ("v1.worker.gpu.dp_utils", "need_eager: bool", "eager: bool", "need_eager=", False),
        ("v1.worker.gpu.model_runner", ".postprocess_sampled(", ".end(", "postprocess_s", True),
        ("v1.worker.gpu.sample.penalties", "use_penalty", "penalized", "use_penalty", False),
        (EAGLE, "num_speculative_tokens <= 1", "num_speculative_tokens < 1", "<= 1", True),
        (CONNECTOR, "finish_forward(self)", "finish_forward(self, late=0)", "no other", False),
    ],
)
def test_a_change_that_breaks_us_is_seen(
    installed: Sources, module: str, text: str, instead: str, told: str, stands: bool
) -> None:
    """A proof may stand in for a text alone, never for a name."""
    moved = planted(installed, module, text, instead)
    assert told in moved[0].problem
    assert any(map(provable, moved)) is stands


@pytest.mark.parametrize(
    ("module", "text", "instead"),
    [
        ("v1.worker.gpu.dp_utils", "need_eager: bool", "fast: int = 0, need_eager: bool"),
        ("v1.worker.gpu.sample.penalties", "class PenaltiesState", "# New.\nclass PenaltiesState"),
        (CONNECTOR, "def finish_forward(self)", "def new(self): ...\n    def finish_forward(self)"),
    ],
)
def test_a_change_that_we_do_not_feel_moves_no_row(
    installed: Sources, module: str, text: str, instead: str
) -> None:
    assert planted(installed, module, text, instead) == []


def test_an_entry_by_version() -> None:
    forms = {"0.32": "a", "0.34": "b"}
    [moved, new] = seams(
        "core", "never", "m", ("f", "call", forms, "why"), ("g", "name", {"0.33": "present"}, "why")
    )
    expected = [
        moved.at(minor_of(version)).expected for version in ("0.32", "0.33.1", "0.34", "1.0")
    ]
    assert expected == ["a", "a", "b", "b"]
    found = {version: ledger_at(version, [moved, new]) for version in ("0.32.0", "0.33.0")}
    assert [seam.path for seam in found["0.32.0"]] == ["m.f"]
    assert [seam.path for seam in found["0.33.0"]] == ["m.f", "m.g"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("parts", [("core", "vit"), ("core", "tree", "draft")])
def test_the_installed_vllm_is_what_presets_turn_on_parts_for(parts: tuple[str, ...]) -> None:
    assert versions.differing(*parts) == []


def test_a_symbol_that_moved_keeps_a_part_off(tmp_path: Path) -> None:
    """Negative control, with the reason that a preset's line of the log has."""
    reports = versions.differing_in(made_up(tmp_path), "0.33.0", ("core", "tree"))
    said = versions.moved_text("0.33.0", ("core", "tree"), reports)
    assert said.startswith("vLLM 0.33.0 is not what core, tree were written for: vllm.")
    assert "found nothing" in said
    # Parts that no symbol is asked of have nothing to miss.
    assert versions.differing_in(made_up(tmp_path), "0.33.0", ()) == []


def test_a_vllm_that_cannot_be_read_stops_nobody(
    tmp_path: Path, fake_module: Callable[..., ModuleType]
) -> None:
    for version in ("0.33.0", "0.1.0", "no version"):
        fake_module("vllm", __version__=version, __file__=str(tmp_path / "vllm" / "__init__.py"))
        said = versions.differing.__wrapped__("tree")
        assert said.startswith("vLLM can't be compared with the ledger: ")
