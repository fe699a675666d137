"""The folder in which a trainer publishes heads, and a server says what became of them. It is all
that the two share, so that either may die at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

WEIGHTS, FACTS, VERDICT = "model.safetensors", "published.json", "verdict"

KEPT, REFUSED = "kept", "refused"
"""What a server says of a head: it was as good as the one before, or worse."""

KEEPS = 4
"""Heads that stay, and the newest one that was kept."""

_NAME = re.compile(r"\d{6}")


@dataclass(frozen=True)
class Facts:
    """What is known of a published head.

    Attributes:
        base: `digest` of the head that the server was started with.
        trained_from: number of the head that training went on with; 0: the base.
        before, after: acceptance length of that head and of this one on the same held-out texts.
        seconds: of training since the base.
    """

    base: str
    trained_from: int
    before: float
    after: float
    seconds: float


_FACTS = TypeAdapter(Facts)


@dataclass(frozen=True)
class Publication:
    """A head of the folder; number 0 is the base. `verdict` is empty until a server gave one. A
    number comes again where the folder was emptied, so `id` has the time of writing in it, in
    nanoseconds."""

    number: int
    folder: Path
    facts: Facts
    verdict: str
    written: int

    @property
    def id(self) -> str:
        return f"{self.number}@{self.written}"

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS


class Publications:
    """Heads below a folder, of one base or several. Methods raise `OSError`, as files do."""

    def __init__(self, folder: Path) -> None:
        self._heads = folder / "heads"

    def each(self, base: str) -> list[Publication]:
        """The heads of a base that are whole, the oldest first."""
        found = (self._read(each) for each in self._folders())
        return [each for each in found if each is not None and each.facts.base == base]

    def publish(self, files: Iterable[Path], facts: Facts) -> Publication:
        """Copy a head's files. It appears at once, whole, and stays when the machine fails."""
        self._heads.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in self._heads.glob(".part-*"):  # Of a trainer that was killed.
            shutil.rmtree(left, ignore_errors=True)
        part = self._heads / f".part-{os.getpid()}"
        part.mkdir()
        try:
            for each in files:
                shutil.copyfile(each, part / each.name)
            (part / FACTS).write_text(json.dumps(asdict(facts)) + "\n")
            for each in (*part.iterdir(), part):
                _sync(each)
            number = 1 + max((int(each.name) for each in self._folders()), default=0)
            folder = part.rename(self._heads / f"{number:06d}")
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        _sync(self._heads)
        return Publication(number, folder, facts, "", _written(folder))

    def judge(self, head: Publication, verdict: str) -> None:
        """Note what became of a head, if it is still there."""
        if (found := self._read(head.folder)) is None or found.id != head.id:
            return
        part = head.folder / f".{VERDICT}-{os.getpid()}"
        part.write_text(verdict)
        part.replace(head.folder / VERDICT)

    def trim(self, base: str) -> None:
        """Remove heads of a base that are old, `KEEPS` and the one that serves excepted."""
        found = self.each(base)
        kept = [each for each in found if each.verdict == KEPT][-1:]
        for each in found[:-KEEPS]:
            if each not in kept:
                shutil.rmtree(each.folder, ignore_errors=True)

    def _folders(self) -> list[Path]:
        try:
            return sorted(each for each in self._heads.iterdir() if _NAME.fullmatch(each.name))
        except FileNotFoundError:
            return []

    def _read(self, folder: Path) -> Publication | None:
        """A head; None if it is being removed, or is none."""
        try:
            facts = _FACTS.validate_json((folder / FACTS).read_bytes())
            written = _written(folder)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        verdict = ""
        with contextlib.suppress(FileNotFoundError):
            verdict = (folder / VERDICT).read_text()
        return Publication(int(folder.name), folder, facts, verdict, written)


def _written(folder: Path) -> int:
    return (folder / FACTS).stat().st_mtime_ns


def digest(head: Path) -> str:
    """What a head's file of weights is known by, whatever it is called."""
    with head.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_of(head: str, revision: str | None = None) -> Path | None:
    """The file of a head's weights, in a folder or in the Hub's cache; None without one."""
    if Path(head).is_dir():
        file = Path(head) / WEIGHTS
        return file if file.is_file() else None
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(head, WEIGHTS, revision=revision)
    except (OSError, ValueError):
        return None
    return Path(found) if found else None


def _sync(path: Path) -> None:
    """Have the disk hold what was written."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
