"""Edits of source files: a file with an instruction; the answer is the file behind the edit."""

from __future__ import annotations

import keyword
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.workloads.request import Request
from benchmarks.workloads.sources import Choice, File, files

_COMMENT = re.compile(r"^ *#.*\n", re.MULTILINE)
_FUNCTION = re.compile(r"^( *)def (\w+)\(.*\).*:\n", re.MULTILINE)


class Edit(NamedTuple):
    """An instruction, and the text that follows it."""

    ask: str
    text: str


def names_in(text: str) -> list[str]:
    """Names in a text that may be renamed, the most frequent first, then by the alphabet."""
    found = Counter(re.findall(r"\b[a-z_]{4,}\b", text))
    for word in (*keyword.kwlist, "self"):
        found.pop(word, None)
    return sorted(found, key=lambda name: (-found[name], name))


def rename(text: str, old: str) -> Edit:
    """The edit that gives a name another one."""
    new = f"{old}_value"
    return Edit(f"Rename {old} to {new}", re.sub(rf"\b{old}\b", new, text))


def edit_of(file: File, dice: random.Random) -> Edit | None:
    """One of the edits that change a file; None if it is one that nobody would ask for."""
    edits = [rename(file.text, name) for name in names_in(file.text)[:1]]
    if _COMMENT.search(file.text):
        text = _COMMENT.sub("", file.text)
        edits.append(Edit("Remove the comments that have a line of their own", text))
    if _FUNCTION.search(file.text):
        text = _FUNCTION.sub(r'\g<0>\1    log.debug("\2")' + "\n", file.text)
        edits.append(Edit("Let each function begin with log.debug of its name", text))
    edit = dice.choice(edits) if edits else None
    # What removes nearly everything is no edit.
    return edit if edit is not None and len(edit.text) > len(file.text) // 2 else None


def edits(choice: Choice, *, predicted: bool = False) -> Iterator[Request]:
    """Edits of a file each; a client may predict that the file stays as it is."""
    dice = choice.random("edits")
    for file in files(choice, "edits"):
        edit = edit_of(file, dice)
        if edit is None:
            continue
        ask = f"{edit.ask} in {file.name}, and write the whole file again.\n\n"
        asked = [{"role": "user", "content": f"{ask}```python\n{file.text}```\n"}]
        answer = f"```python\n{edit.text}```\n"
        yield Request(asked, answer, prediction=f"```python\n{file.text}```\n" if predicted else "")
