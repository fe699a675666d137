"""The counters of the vision runner, which ``graft_info()`` shows."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm_graft.base.log import logger

Reason = str
"""A word to count by: why a batch was declined, or why a graph was not kept."""


@dataclass
class VitStats:
    """Counters since the runner was built: images and videos by what served them (exact, bucket,
    fused, eager), replays and captures by kind of graph, declined batches and dropped graphs by
    reason, the latest failures, patches of replayed padded graphs without and with padding, and
    wall seconds of captures and measurements while serving."""

    items: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    declines: Counter[str] = field(default_factory=Counter)
    captures: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    rows: int = 0
    padded_rows: int = 0
    capture_seconds: float = 0.0

    def fail(self, cause: str, warning: str = "") -> None:
        """Keep the cause with the latest few, and log it in a warning if there is one."""
        self.failures = [*self.failures[-7:], cause]
        if warning:
            logger.warning(warning, cause)

    def report(self) -> dict[str, Any]:
        plain = {
            name: dict(found) if isinstance(found, Counter) else found
            for name, found in vars(self).items()
        }
        return {**plain, "capture_seconds": round(self.capture_seconds, 6)}
