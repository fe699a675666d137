"""What a part cannot be combined with, as data: checked in the frontend, and printed as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_graft.base import markdown

Find = Callable[[Any, Any], Iterable[str]]
"""From a part's section and vLLM's configuration, a sentence for each thing to change."""


@dataclass(frozen=True)
class Refusal:
    """One thing that rules a part out.

    Attributes:
        what: the thing, as a user knows it.
        why: why the part can't be combined with it.
        instead: what to do.
        find: looks for it in a configuration.
    """

    what: str
    why: str
    instead: str
    find: Find

    def told(self) -> dict[str, str]:
        """The words of it, for programs."""
        return {"what": self.what, "why": self.why, "instead": self.instead}


def sentences(refusals: Sequence[Refusal], asked: Any, vllm_config: Any) -> Iterator[str]:
    """A sentence for each refusal that applies."""
    for refusal in refusals:
        yield from refusal.find(asked, vllm_config)


def as_table(refusals: Iterable[Refusal]) -> str:
    """The refusals as a table in Markdown."""
    rows = [(each.what, each.why, each.instead) for each in refusals]
    return markdown.table(("what", "why", "instead"), rows)
