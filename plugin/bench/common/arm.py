"""An arm of a comparison: an engine, and the columns of the table that it fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Arm:
    """An engine, and the columns of the table that it fills.

    Attributes:
        name: the name as it was given.
        options: options of ``vllm.LLM``.
        drafts: lengths of its chains, one column each; empty where there is one column and the
            engine itself decides.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    drafts: tuple[int, ...] = ()

    @property
    def columns(self) -> dict[str, int | None]:
        """Drafts to fix for each column; None where nothing is to be fixed."""
        base, plus, suffixes = self.name.partition("+")
        kind = base.partition(":")[0]
        fixed: dict[str, int | None] = {
            f"{kind}:{count}{plus}{suffixes}": count for count in self.drafts
        }
        return fixed or {self.name: None}


def is_ours(column: str) -> bool:
    """Return whether a column is an arm of vllm-graft."""
    return column.startswith(("tree:", "auto:", "ours"))
