"""Choices, read from the grammar that vLLM makes of them."""

from __future__ import annotations

import json
import re

_LITERAL = r'"(?:[^"\\\n]|\\.)*"'
_CHOICE = re.compile(rf"\s*root\s*::=\s*{_LITERAL}(?:\s*\|\s*{_LITERAL})*\s*")


def choices_in(grammar: str) -> list[str] | None:
    """The texts that a grammar of one rule permits; None if it is another kind of grammar.

    With xgrammar a request's ``choice`` arrives as such a grammar. Its literals are written as in
    JSON.
    """
    if not _CHOICE.fullmatch(grammar):
        return None
    try:
        return [json.loads(literal) for literal in re.findall(_LITERAL, grammar)]
    except ValueError:
        return None
