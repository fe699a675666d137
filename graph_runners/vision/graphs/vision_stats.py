"""What the runner counts, for ``graft_info()``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class VitStats:
    """Counters since the runner was built.

    Attributes:
        items: images and videos, by the tier that served them: exact, bucket, fused, eager.
        replays: by tier.
        declines: batches left to the engine's own path, by reason.
        cuts: batches larger than any graph that were served by several.
        captures: by tier.
        dropped: captured graphs that were not kept, by reason.
        failures: the latest causes, as text.
        rows: patches that were asked for in bucket replays.
        padded_rows: patches that these replays had in all.
        capture_seconds: wall time of captures, and of measuring what is cut, while serving.
    """

    items: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    declines: Counter[str] = field(default_factory=Counter)
    cuts: int = 0
    captures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rows: int = 0
    padded_rows: int = 0
    capture_seconds: float = 0.0

    def fail(self, cause: str) -> None:
        """Keep the cause with the latest few."""
        self.failures = [*self.failures[-7:], cause]

    def report(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "items": dict(self.items),
            "replays": dict(self.replays),
            "declines": dict(self.declines),
            "cuts": self.cuts,
            "captures": dict(self.captures),
            "dropped": dict(self.dropped),
            "failures": list(self.failures),
            "rows": self.rows,
            "padded_rows": self.padded_rows,
            "capture_seconds": round(self.capture_seconds, 6),
        }
