"""What a configuration may be made of, and how its keys and values are shown in a message."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePath

from vllm_graft.base.errors import ConfigError

MAX_DEPTH = 16
"""Lists and mappings within each other."""

MAX_TEXT = 4096
"""Characters of a text; no path of the system is longer."""

MAX_INTEGER = 2**63 - 1

_SHOWN = 120
"""Characters of a value that a message shows."""

_KEY = 64
"""Characters of a key that a message shows as it is."""

_LINES = 10
"""Lines of a message; a configuration may have thousands of wrong keys."""


def require_plain(value: object, path: str) -> None:
    """Refuse what no JSON file could say, and what is too large to be meant.

    vLLM hashes its configuration as JSON and hands it to other processes: whatever else stands in
    it would fail there, or come out as something else. A path (`pathlib`) is taken for its text.

    Args:
        value: what stands under ``path``.
        path: full flag of ``value``, for the error.

    Raises:
        ConfigError: with a line for each value that is refused.
    """
    if problems := list(islice(_strange(value, path, 0), _LINES + 1)):
        raise ConfigError(several(problems))


def several(problems: Iterable[str]) -> str:
    """Lines of one message, as many as somebody will read."""
    lines = list(problems)
    if len(lines) > _LINES:
        lines[_LINES:] = ["There are more of them."]
    return "\n".join(lines)


def below(path: str, *keys: object) -> str:
    """The full flag of what stands below a flag: ``below("--x", "a", 0) == "--x.a[0]"``."""
    return path + "".join(map(_step, keys))


def shown(value: object) -> str:
    """A value in one line that is not too long, whatever it is."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # An integer of thousands of digits; a third party's __repr__.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def lever(name: str) -> int | None:
    """The whole number in an environment variable for debugging; None where it is not set.

    Raises:
        ConfigError: if it is no number from 0 on.
    """
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(
            f"{name} is {shown(text)} in the environment: give a number, or unset it."
        )
    return int(text[:_KEY]) if text else None


def printable(text: str) -> str:
    """A text whose control characters are escaped, as a terminal would obey them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def reason_of(error: BaseException) -> str:
    """``RuntimeError: out of paper``, in one line, whatever the error is."""
    try:
        text = printable(" ".join(str(error).split()))
    except Exception:  # A third party's __str__.
        text = ""
    if len(text) > 4 * _SHOWN:
        text = text[: 4 * _SHOWN] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _step(key: object) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    plain = isinstance(key, str) and key.isprintable() and 0 < len(key) <= _KEY
    return f".{key}" if plain else f".{shown(key)}"


def _strange(value: object, path: str, depth: int) -> Iterator[str]:
    if isinstance(value, (dict, list, tuple)):
        if depth == MAX_DEPTH:
            yield f"{path}: lists and mappings are nested more than {MAX_DEPTH} deep."
        elif isinstance(value, dict):
            yield from _strange_mapping(value, path, depth)
        else:
            for index, member in enumerate(value):
                yield from _strange(member, below(path, index), depth + 1)
    elif reason := _strange_scalar(value):
        yield f"{path}: {shown(value)} is refused: {reason}."


def _strange_mapping(values: dict[object, object], path: str, depth: int) -> Iterator[str]:
    for key, value in values.items():
        if not isinstance(key, str):
            yield f"{path}: the key {shown(key)} is refused: a key is a text."
        elif reason := _strange_text(key):
            yield f"{path}: the key {shown(key)} is refused: {reason}."
        else:
            yield from _strange(value, below(path, key), depth + 1)


def _strange_scalar(value: object) -> str | None:
    if isinstance(value, (str, PurePath)):
        return _strange_text(str(value))
    if isinstance(value, int):  # Also true and false.
        return None if abs(value) <= MAX_INTEGER else "it is too large for a number"
    if isinstance(value, float):
        return None if math.isfinite(value) else "it is no finite number"
    if value is None:
        return None
    return f"a {type(value).__name__} is neither text, number, true, false, null, list nor mapping"


def _strange_text(text: str) -> str | None:
    if len(text) > MAX_TEXT:
        return f"it has {len(text)} characters, more than {MAX_TEXT}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is no text in Unicode"
    return None
