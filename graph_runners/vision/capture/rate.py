"""How much of the wall time captures may take."""

from __future__ import annotations

from typing import Protocol


class Rate(Protocol):
    """How often captures may happen."""

    @property
    def plenty(self) -> bool:
        """Whether nothing is saved by waiting for a better key."""

    def start(self, now: float) -> None:
        """Serving begins."""

    def ready(self, now: float) -> bool:
        """Whether a capture may start at `now`, in seconds of a monotonic clock."""

    def spent(self, seconds: float) -> None:
        """Count a capture that took so long."""


class TimeShare:
    """At most a share of the wall time since `start` goes into captures, idle time included.

    Credit begins at nothing, so the share is a bound from the first second on; what one capture
    takes longer than those before is a debt. Not for ranks that have to agree: their clocks
    differ.

    Args:
        share: of wall time, 0 to 1; 1 is no limit.
        burst: seconds that may be spent at once after an idle time.
        expected: seconds of a capture, while there was none.
    """

    def __init__(self, share: float, burst: float = 0.2, expected: float = 0.05) -> None:
        self.share, self.burst = share, burst
        self._expected = expected
        self._credit = 0.0
        self._last: float | None = None

    @property
    def plenty(self) -> bool:
        """Where there is no limit, or credit is full: more would be lost."""
        return self.share >= 1 or self._credit >= self.burst

    def start(self, now: float) -> None:
        """Begin to earn, with no credit."""
        self._credit, self._last = 0.0, now

    def ready(self, now: float) -> bool:
        """Whether there is credit for one capture as long as those before."""
        if self._last is not None:
            earned = self.share * (now - self._last)
            self._credit = min(self.burst, self._credit + earned)
        self._last = now
        if self.share >= 1:
            return True
        # Where one capture is longer than the burst, full credit has to do.
        return self.share > 0 and self._credit >= min(self._expected, self.burst)

    def spent(self, seconds: float) -> None:
        """Credit may fall below nothing."""
        self._credit -= seconds
        self._expected = max(seconds, 0.5 * (self._expected + seconds))


class Never:
    """No captures but those at the start, for ranks that have to agree."""

    plenty = False

    def start(self, now: float) -> None:
        """Nothing is earned."""

    def ready(self, now: float) -> bool:
        """No."""
        return False

    def spent(self, seconds: float) -> None:
        """Nothing to count."""
