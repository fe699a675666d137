"""Write what the code says into the pages of `docs`: ``.venv/bin/python .ci/pages.py``."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from vllm_graft.base.markdown import table
from vllm_graft.base.options import Section, bounds_of, section_type
from vllm_graft.cli import main
from vllm_graft.config import GraftConfig
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.spec_decode.config.memory_config import MemoryConfig
from vllm_graft.spec_decode.config.ngram_config import NgramConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRINTED = {"support": "support.md", "metrics": "metrics.md"}
"""The page that holds what a command prints, between the markers of its name."""
SECTIONS: dict[str, tuple[str, type[Section]]] = {
    **{
        name: ("configuration.md", section)
        for name, field in GraftConfig.model_fields.items()
        if (section := section_type(field.annotation)) is not None
    },
    "ngram": ("configuration.md", NgramConfig),
    "memory": ("configuration.md", MemoryConfig),
    "hicache": ("hicache.md", HiCacheConfig),
}
"""The page that holds the keys of a section, between the markers of its name."""
KINDS = {int: "a number", float: "a number", str: "a text", bool: "`true`, `false`"}
KINDS |= {ByteSize: "a size", Path: "a folder", dict: "a mapping", tuple: "a list"}


def pages() -> dict[Path, str]:
    """Return each page that holds something of the code's, as it should be."""
    found: dict[Path, str] = {}
    for name, (page, text) in _parts().items():
        path = DOCS / page
        before, begin, rest = found.get(path, path.read_text()).partition(
            f"<!-- {name}:begin -->\n"
        )
        _, end, after = rest.partition(f"<!-- {name}:end -->")
        if not begin or not end:
            sys.exit(f"{path} has no markers for {name}")
        found[path] = before + begin + text + end + after
    return found


def _parts() -> dict[str, tuple[str, str]]:
    parts = {command: (page, _printed(command)) for command, page in PRINTED.items()}
    for name, (page, section) in SECTIONS.items():
        head = ["key", "default", "allowed", "meaning"]
        parts[name] = (page, table(head, [*_rows(section)]) + "\n")
    return parts


def _printed(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([command, "--markdown"])
    return printed.getvalue()


def _rows(section: type[Section], prefix: str = "") -> Iterator[list[str]]:
    """A row for each key. Keys of a section that has all defaults follow its name and a dot."""
    meanings = _meanings(section)
    for key, field in section.model_fields.items():
        inner = section_type(field.annotation)
        is_always = inner is field.annotation
        if inner is not None and is_always:
            yield from _rows(inner, f"{prefix}{key}.")
        else:
            yield [f"`{prefix}{key}`", _default(field), _allowed(field), meanings[key]]


def _meanings(section: type[Section]) -> dict[str, str]:
    """The texts below the keys of a section, and of those that it inherits from."""
    found: dict[str, str] = {}
    for each in reversed(section.__mro__):
        if not issubclass(each, Section) or each is Section:
            continue
        [node] = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(node, ast.ClassDef)
        for key, text in zip(node.body, node.body[1:]):
            match key, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ):
                    found[name] = re.sub(r"\s+", " ", meaning).replace("``", "`")
    return found


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value is None:
        return "none"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable().replace('.0', '')}`"
    return f"`{str(value).lower()}`"


def _allowed(field: FieldInfo) -> str:
    return bounds_of(field) or ", ".join(dict.fromkeys(_kinds(field.annotation, field.metadata)))


def _kinds(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return
    if origin is Literal:
        yield from (f"`{each}`" for each in arguments)
    elif section_type(annotation) is annotation:
        yield "`true`, `false`, or keys"
    elif annotation is str and any(hasattr(each, "min_length") for each in metadata):
        yield "a name"
    elif annotation in KINDS or origin in KINDS:
        yield KINDS[annotation if annotation in KINDS else origin]
    elif hasattr(annotation, "__metadata__"):
        yield from _kinds(arguments[0], [*annotation.__metadata__])
    else:
        for each in arguments:
            yield from _kinds(each, metadata)


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
    for script in ("results", "figures", "rooms"):
        file = DOCS / "site" / f"{script}.py"
        subprocess.run([sys.executable, str(file)], check=True)
