"""The ledger's check from source files alone: the installed vLLM, and one with a moved symbol."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.seams import versions
from vllm_graft.seams.compare import ledger_at, vllm_version
from vllm_graft.seams.ledger.entry import Kind, Seam, minor_of, seams
from vllm_graft.seams.sources import Sources, is_unknown, read_seams

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
        ("maybe.fallback", "def", "a, b="),
    ],
)
def test_what_a_file_tells(tmp_path: Path, path: str, kind: Kind, found: str) -> None:
    assert read(made_up(tmp_path), path, kind, found) == found


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


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"text"])
def test_what_is_no_wheel_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "vllm-0.34.0.whl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be read as a wheel"):
        Sources(file)


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no vLLM"):
        Sources(tmp_path)


def test_the_installed_vllm_reads_as_it_imports() -> None:
    """No entry is unknown or wrong: each has the form that importing finds."""
    import vllm

    reports = read_seams(ledger_at(vllm_version()), Sources(Path(vllm.__file__).parents[1]))
    assert [report.problem for report in reports if report.problem] == []
    assert not any(map(is_unknown, reports))


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
