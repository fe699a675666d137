"""One entry of the ledger, and how a file of the ledger is written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from vllm_graft.base.errors import SeamError

Kind = Literal["class", "call", "source", "order", "has", "name", "module"]
Minor = tuple[int, int]


def minor_of(version: str) -> Minor:
    """``(0, 32)`` of ``"0.32.1+cpu"``. Raises `SeamError` if the text is no version."""
    numbers = version.split(".")
    try:
        return int(numbers[0]), int(numbers[1])
    except (IndexError, ValueError):
        raise SeamError(f"vLLM calls itself {version!r}, which is no version") from None


def items(listing: str) -> list[str]:
    """What commas outside of parentheses part."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(listing):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            found.append(listing[start:place].strip())
            start = place + 1
    last = listing[start:].strip()
    return [*found, last] if last else found


def head_of(expected: str) -> tuple[str | None, str]:
    """What stands in parentheses at the beginning, and what follows it; None if nothing does."""
    if not expected.startswith("("):
        return None, expected
    head, _, rest = expected[1:].partition(")")
    return head, rest.removeprefix(", ")


@dataclass(frozen=True)
class Seam:
    """One upstream symbol.

    Attributes:
        part: who needs it, as ``tree`` or ``hicache``; ``native``: our parts of the host KV cache
            in vLLM's own connector.
        path: dotted path, below ``vllm.``.
        kind: how it is compared. ``class``: the names of its bases; ``call``: the parameters that
            are required and, with ``=`` behind them, those optional ones that we pass by name; ``no
            other`` at their end: ours stands in its place and would not know what is added;
            ``has``: members, fields or attributes of a class or module, and ``name(...)`` for the
            parameters of one, as for ``call``; ``order``: texts that its source holds in this
            order; ``source``: hash of its source, where nothing else can tell; ``name``: it exists;
            ``module``: it is there. In parentheses, ``has``, ``order`` and ``source`` may begin
            with a class's bases or a function's parameters.
        expected: what ``kind`` yields on the oldest vLLM that we know.
        why: what we do with it.
        until: what would make it unnecessary.
        later: from which minor version on vLLM has it otherwise, and how; the oldest first.
        since: the minor version that brought it; an older vLLM is not asked for it.
    """

    part: str
    path: str
    kind: Kind
    expected: str
    why: str
    until: str
    later: tuple[tuple[Minor, str], ...] = ()
    since: Minor = (0, 0)

    def at(self, minor: Minor) -> Self:
        """The entry with what a minor version of vLLM is expected to have."""
        known = [self.expected, *(expected for since, expected in self.later if since <= minor)]
        return replace(self, expected=known[-1], later=())


Row = tuple[str, Kind, str | Mapping[str, str], str]
"""Path below the prefix, kind, what is expected, why. What is expected is one text, or one per
minor version from which on it is so, the oldest first."""


def seams(part: str, until: str, prefix: str, *rows: Row) -> Iterator[Seam]:
    """Rows of one part, below one prefix, which one change of vLLM's would make unnecessary."""
    for path, kind, expected, why in rows:
        forms = {"0.0": expected} if isinstance(expected, str) else expected
        (since, first), *later = ((minor_of(minor), form) for minor, form in forms.items())
        whole = ".".join(filter(None, (prefix, path)))
        yield Seam(part, whole, kind, first, why, until, tuple(later), since)
