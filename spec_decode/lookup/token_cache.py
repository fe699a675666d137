"""Tokens of texts that requests have in common, such as the schemas of an agent's tools."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Tokens(NamedTuple):
    """The int32 tokens of a piece of text, and whether it stands at the beginning of an answer."""

    tokens: Sequence[int]
    opens: bool


class Split(NamedTuple):
    """The pieces of a text that have room, the likeliest first, and whether something was left
    out."""

    pieces: Sequence[Tokens] = ()
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(_OBJECT + 4 * len(each.tokens) for each in self.pieces) + _OBJECT


_OBJECT = 256
"""Host bytes of a piece beside its tokens, and of an entry."""


class TokenCache:
    """Keeps what was made of texts, the last used ones, within so many host bytes.

    A key is a hash: no text of a request is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, Split] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @staticmethod
    def key(kind: str, text: str) -> bytes:
        return hashlib.blake2b(f"{kind} {text}".encode("utf-8", "surrogatepass")).digest()

    def get(self, key: bytes) -> Split | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def put(self, key: bytes, made: Split) -> None:
        """Keep something that has room at all; what was used longest ago makes room for it."""
        if made.num_bytes > self.max_bytes:
            return
        if (old := self._kept.pop(key, None)) is not None:
            self.num_bytes -= old.num_bytes
        self._kept[key] = made
        self.num_bytes += made.num_bytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes
