"""Sessions of agents that edit code by tools: a transcript that grows by each call and its result.

Results of tools are recorded, so that a session goes on in the same way whatever the model says.
Three sessions work on each file, some others between them, as people of one team do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from benchmarks.workloads.edits import names_in, rename
from benchmarks.workloads.request import Message, Request
from benchmarks.workloads.sources import Choice, File, files

_NAME = {"type": "string", "pattern": "^[A-Za-z_ ]{2,40}$"}
_PATH = {"type": "string", "pattern": "^[A-Za-z0-9_/]{2,80}\\.py$"}
_LINE = {"type": "integer", "minimum": 1, "maximum": 9999}


def _tool(name: str, does: str, **arguments: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of OpenAI's API, all of whose arguments are required."""
    inner = {
        "type": "object",
        "properties": arguments,
        "required": list(arguments),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": does, "parameters": inner},
    }


TOOLS: tuple[dict[str, Any], ...] = (
    _tool("search_code", "Lines that have a text.", query=_NAME, whole_words={"type": "boolean"}),
    _tool("read_file", "Lines of a file.", path=_PATH, first_line=_LINE, last_line=_LINE),
    _tool(
        "replace_text",
        "Replace lines, which must occur once.",
        path=_PATH,
        old={"type": "string"},
        new={"type": "string"},
    ),
    _tool(
        "run_tests",
        "Run tests of files.",
        paths={"type": "array", "items": _PATH, "maxItems": 3},
        report={"enum": ["short", "long"]},
    ),
)
"""Tools of the kinds that agents have: free text, paths, numbers, enums, flags and lists."""


def schema_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a call of a tool: its name and its arguments."""
    function = tool["function"]
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


CALL = {"anyOf": [schema_of(tool) for tool in TOOLS]}
"""The schema of any call."""

SYSTEM = (
    "You change a code base by tools. Call one tool at a time, as JSON with its name and its "
    "arguments. When the tests pass, say in a few words what you changed, and show the new lines."
)
TURNS = 8
"""Requests of a session at most."""

SHARED, BETWEEN = 3, 8
"""Sessions on a file, and files in turn."""


def call(number: int, **arguments: Any) -> str:
    """A call of a tool as the model writes it."""
    named = {"name": TOOLS[number]["function"]["name"], "arguments": arguments}
    return json.dumps(named, separators=(",", ":"))


def hunks(places: list[int]) -> list[range]:
    """Runs of lines that are near each other, each of which an agent replaces at once."""
    found: list[range] = []
    for place in places:
        if found and place - found[-1].stop < 3 and place - found[-1].start < 8:
            found[-1] = range(found[-1].start, place + 1)
        else:
            found.append(range(place, place + 1))
    return found


def turns_of(file: File, old: str, dice: random.Random) -> Iterator[tuple[str, str]]:
    """Each call of a session that renames a name in a file, with its result; the last has none."""
    lines, edit, path = file.text.splitlines(), rename(file.text, old), file.name
    new_lines = edit.text.splitlines()
    where = [place for place, line in enumerate(lines) if line != new_lines[place]]
    hits = "\n".join(f"{path}:{place + 1}:{lines[place]}" for place in where)
    yield call(0, query=old, whole_words=True), hits
    numbered = "\n".join(f"{number:>4}  {line}" for number, line in enumerate(lines, 1))
    yield call(1, path=path, first_line=1, last_line=len(lines)), numbered

    def replace(hunk: range, around: int) -> str:
        shown = slice(max(0, hunk.start - around), hunk.stop + around)
        old_text, new_text = ("\n".join(each[shown]) for each in (lines, new_lines))
        return call(2, path=path, old=old_text, new=new_text)

    first, *rest = hunks(where)
    if dice.random() < 0.5:
        # The tool refuses the first try; the second has more lines.
        yield replace(first, 0), f"error: this occurs 2 times in {path}; give more lines around it"
    yield replace(first, 2), f"replaced {len(first)} lines in {path}"
    for hunk in rest[:1]:
        failed = f'File "{path}", line {hunk.start + 1}\n    {lines[hunk.start].strip()}\n'
        yield call(3, paths=[path], report="long"), f"{failed}NameError: {old}\n1 failed"
        yield replace(hunk, 1), f"replaced {len(hunk)} lines in {path}"
    yield call(3, paths=[path], report="short"), f"{dice.randrange(3, 40)} passed"
    shown = "\n".join(new_lines[place] for place in where[:6])
    yield f"{edit.ask.replace('Rename', 'Renamed')} in {path}:\n\n```python\n{shown}\n```\n", ""


def session(name: str, file: File, old: str, dice: random.Random) -> Iterator[Request]:
    """The requests of a session, one for each call and one for what it says in the end."""
    ask = f"Rename {old} to {old}_value in {file.name}. (Task {name})"
    chat: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}]
    for answer, result in turns_of(file, old, dice):
        schema = CALL if result else {}
        yield Request([*chat], answer, tools=[*TOOLS], schema=schema, session=name)
        chat.append({"role": "assistant", "content": answer})
        chat.append({"role": "tool", "content": result})


def agent(choice: Choice) -> Iterator[Request]:
    """The requests of sessions, one session after another."""
    dice, found = choice.random("agent"), files(choice, "agent")
    numbered = ((number, each) for number, each in enumerate(found) if names_in(each.text)[1:])
    while block := [*islice(numbered, BETWEEN)]:
        for worker in range(SHARED):
            for number, file in block:
                old = dice.choice(names_in(file.text)[1:4])
                yield from session(f"{number}.{worker}", file, old, dice)
