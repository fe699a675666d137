"""Which texts copy themselves, seen by the scheduler while nothing is drafted."""

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.request import Request

WATCHED = 4
"""Requests of a batch that are looked at, the first ones. Raised, copies in a large batch are
noticed more surely, and the scheduler works longer."""

EVERY = 4
"""Steps from one look to the next. Raised, the scheduler works less, and copies are found later."""

WINDOW = 8192
"""Last tokens of a text in which copies are looked for. To read so many takes 0.1 ms, once for a
request; to look through them 10 us."""


PLACES = 64
"""Places of a text's last token at which is looked, the latest ones. Raised, texts of few different
tokens take longer, and copies of what was said long ago are noticed more surely."""


class CopiedTexts:
    """The last tokens of some requests' texts."""

    def __init__(self, requests: Mapping[str, "Request"]) -> None:
        self._requests = requests
        self._texts: dict[str, tuple[int, array[int]]] = {}
        self._steps = 0

    def longest(self, names: Sequence[str], most: int) -> int:
        """Tokens at the end of one of these requests' texts that stood in it before, `most` at
        most; 0 in steps that don't look."""
        self._steps += 1
        if self._steps % EVERY:
            return 0
        watched = [name for name in names[:WATCHED] if name in self._requests]
        self._texts = {name: self._read(name) for name in watched}
        return max((copied(text, most) for _, text in self._texts.values()), default=0)

    def _read(self, name: str) -> tuple[int, "array[int]"]:
        """The tokens that were read of a request, and the last of them."""
        tokens = self._requests[name].all_token_ids
        count = len(tokens)
        read, text = self._texts.get(name, (0, array("i")))
        if not 0 <= count - read <= WINDOW or len(text) > 2 * WINDOW:
            read, text = max(0, count - WINDOW), array("i")
        text.extend(tokens[read:])
        return count, text


def copied(text: Sequence[int] | npt.NDArray[np.int32], most: int) -> int:
    """Tokens at the end of a text that also stand elsewhere in it one after the other, `most` at
    most."""
    tokens = np.asarray(text, dtype=np.int32)[-WINDOW:]
    end, length = len(tokens) - 1, 0
    if end < 1:
        return 0
    places = np.flatnonzero(tokens[:end] == tokens[end])[-PLACES:]
    while places.size and length < most:
        length += 1
        places = places[places >= length]
        places = places[tokens[places - length] == tokens[end - length]]
    return length
