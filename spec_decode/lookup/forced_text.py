"""Text that is partly known before it is written, and the pieces of it that are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT = 1
"""Known texts that stand before each alternative but the first: enough to tell where it belongs."""

_WORK = 4
"""Characters that are handled for each one that there is room for."""


class Choice(NamedTuple):
    """Alternatives, of which one comes; the first is taken to be the likeliest."""

    alternatives: Sequence[Sequence[Item]]


Item = str | Choice | None
"""A known text, one of several, or a gap: a text that is not known."""


class Piece(NamedTuple):
    """A stretch of known text, and whether it opens the whole."""

    text: str
    opens: bool


class _Full(Exception):
    """There is no room for another piece."""


class _Open:
    """A piece that may go on: known texts, and whether the first of them opens the whole."""

    def __init__(self, parts: list[str], *, opens: bool) -> None:
        self.parts, self.opens = parts, opens

    def tail(self) -> _Open:
        kept = self.parts[-CONTEXT:]
        return _Open(kept, opens=self.opens and len(kept) == len(self.parts))


class _Pieces:
    def __init__(self, room: int) -> None:
        self.room = room
        self.work = _WORK * room
        self.found: dict[Piece, None] = {}

    def spend(self, characters: int) -> None:
        """Stop where more characters were handled than pieces are worth."""
        self.work -= 1 + characters
        if self.work < 0:
            raise _Full

    def close(self, piece: _Open, behind: str = "") -> None:
        """Keep a piece that does not go on."""
        text = "".join(piece.parts) + behind
        self.spend(len(text))
        made = Piece(text, piece.opens)
        if not text or made in self.found:
            return
        if len(text) > self.room:
            raise _Full
        self.room -= len(text)
        self.found[made] = None

    def walk(self, items: Sequence[Item], piece: _Open, behind: str) -> _Open:
        """Go through items from an open piece on, which grows; return the one that is open at their
        end. The known text after them is `behind`."""
        for number, item in enumerate(items):
            if item is None:
                self.close(piece)
                piece = _Open([], opens=False)
            elif isinstance(item, str):
                self.spend(len(item))
                piece.parts.append(item)
            else:
                after = known(items, number + 1, behind)
                self.spend(len(after))
                first, *others = item.alternatives
                for other in others:
                    self.close(self.walk(other, piece.tail(), after), after)
                piece = self.walk(first, piece, after)
        return piece


def known(items: Sequence[Item], start: int, behind: str) -> str:
    """The text from an item on that is known, `behind` what comes after all items."""
    parts: list[str] = []
    for place in range(start, len(items)):
        if not isinstance(item := items[place], str):
            return "".join(parts)
        parts.append(item)
    return "".join(parts) + behind


def pieces_of(items: Sequence[Item], room: int) -> list[Piece]:
    """The known stretches of a text, in its order, of at most `room` characters together.

    A stretch ends at a gap. Each further alternative of a `Choice` is a piece of its own, with the
    known text before it and behind it, and stands before the piece of the first.
    """
    pieces = _Pieces(room)
    with contextlib.suppress(_Full):
        pieces.close(pieces.walk(items, _Open([], opens=True), ""))
    return list(pieces.found)
