"""Write what the code says into the pages of `docs`: ``.venv/bin/python .ci/pages.py``."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ByteSize
from pydantic.fields import FieldInfo

from vllm_graft.base.options import Section, bounds_of, section_type
from vllm_graft.base.text_table import markdown as table
from vllm_graft.cli import main
from vllm_graft.config import GraftConfig
from vllm_graft.hicache.config.cache_config import HiCacheConfig
from vllm_graft.spec_decode.config.tree_config import MemoryConfig, NgramConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRINTED = {"support": "support.md", "metrics": "metrics.md"}
"""The page that holds what a command prints, between the markers of its name."""
SECTIONS: dict[str, tuple[str, str, type[Section]]] = {
    **{
        name: ("configuration.md", f"### `graft.{name}.", section)
        for name, field in GraftConfig.model_fields.items()
        if (section := section_type(field.annotation)) is not None
    },
    "ngram": ("configuration.md", "#### `graft.tree.ngram.", NgramConfig),
    "memory": ("configuration.md", "#### `graft.tree.memory.", MemoryConfig),
    "hicache": ("hicache.md", "#### `", HiCacheConfig),
}
"""The page that holds the keys of a section, between the markers of its name, and how the heading
of a key begins. Each has one of its own, so that searches and links find it."""
_CLASS = re.compile(r"\b(\w+For(?:CausalLM|ConditionalGeneration))\b")
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
    parts["models"] = ("models.md", _models())
    for name, (page, heading, section) in SECTIONS.items():
        parts[name] = (page, "".join(_keys(section, heading)))
    return parts


def _printed(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main([command, "--markdown"])
    return printed.getvalue()


def _models() -> str:
    """The table of models, of what `benchmarks.plan_models` has written."""
    planned = json.loads((DOCS / "models.json").read_text())
    results = json.loads((DOCS / "results.json").read_text())["results"]
    measured = {each for result in results for each in result.get("architectures", ())}
    head = ["model", "layers", "drafter", "with `auto`", "GPUs, weights on each", "tested"]
    rows = []
    for row in planned["models"]:
        architecture = row["architecture"]
        tested = ["exact"] * (_stem(architecture) in _served()) + ["speed"] * (
            architecture in measured
        )
        weights = row["weights"]
        size = f"{weights / 2**30:.0f} GiB" if weights is not None else "unknown"
        rows.append(
            [
                row["model"],
                re.sub(r"^with | \([^)]*\)| attention", "", row["layers"]),
                f"`{row['head']}`, or {row['drafter']}" if row["head"] else row["drafter"],
                _outcome(row),
                f"{row['gpus']} x {planned['gpu']}, {size}",
                ", ".join(tested) or "shape",
            ]
        )
    return table(head, rows) + "\n"


def _outcome(row: dict[str, Any]) -> str:
    """The drafts that a preset chooses, or why there are none, and whether images get graphs."""
    why = row["why"].rpartition("are off: ")[2]
    why = re.sub(r" \([^)]*\)", "", re.split(r"[.:] | with --", why)[0].rstrip("."))
    drafts = row["drafts"] or f"no trees: {why}"
    return re.sub(r" by '.*", "", drafts) + ("; vision graphs" if "vit" in row["parts"] else "")


@cache
def _served() -> set[str]:
    """The kinds of models of which tests write tiny checkpoints, to compare engines' answers."""
    folders = ("tests/support/models", "tests/support/vision", "plugin/testing/models")
    files = (file for folder in folders for file in (DOCS.parent / folder).glob("*.py"))
    return {_stem(name) for file in files for name in _CLASS.findall(file.read_text())}


def _stem(architecture: str) -> str:
    return re.sub("For(CausalLM|ConditionalGeneration)$", "", architecture)


def _keys(section: type[Section], heading: str) -> Iterator[str]:
    """A paragraph for each key. Keys of a section that has all defaults follow its name."""
    meanings = _meanings(section)
    for key, field in section.model_fields.items():
        inner = section_type(field.annotation)
        if inner is not None and inner is field.annotation:
            yield from _keys(inner, f"{heading}{key}.")
        else:
            given = "Required" if field.is_required() else f"Default {_default(field)}"
            yield f"{heading}{key}`\n\n{given}; {_allowed(field)}. {meanings[key]}\n\n"


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
