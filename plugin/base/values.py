"""How keys, values and errors are shown in a message, and levers of the environment."""

import os
from collections.abc import Iterable

from pydantic import ByteSize

from vllm_graft.base.errors import ConfigError

_SHOWN = 120
"""Characters of a value that a message shows."""

_KEY = 64
"""Characters of a key that a message shows as it is."""

MAX_LINES = 10
"""Lines of a message; a configuration may have thousands of wrong keys."""


def several(problems: Iterable[str]) -> str:
    """Lines of one message, as many as somebody will read."""
    lines = list(problems)
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = ["There are more of them."]
    return "\n".join(lines)


def below(path: str, *keys: object) -> str:
    """The full flag of what stands below a flag: ``below("--x", "a", 0) == "--x.a[0]"``."""
    return path + "".join(map(_step, keys))


def human(num_bytes: int) -> str:
    """Bytes in a unit that a person reads."""
    return ByteSize(num_bytes).human_readable(separator=" ")


def shown(value: object) -> str:
    """A value in one line that is not too long, whatever it is."""
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # An integer of thousands of digits; a third party's __repr__.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def lever(name: str) -> int | None:
    """The whole number in an environment variable for debugging; None where it is not set. Raises
    `ConfigError` if it is no number from 0 on."""
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
        # What is wrong often stands at the end.
        text = f"{text[: 2 * _SHOWN]} ... {text[-2 * _SHOWN :]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _step(key: object) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    plain = isinstance(key, str) and key.isprintable() and 0 < len(key) <= _KEY
    return f".{key}" if plain else f".{shown(key)}"
