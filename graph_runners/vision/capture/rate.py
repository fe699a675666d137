"""How much of the wall time captures may take."""

from __future__ import annotations


class TimeShare:
    """Captures take at most a share of the wall time since `start`, idle time included.

    Credit starts at zero, so the share is a bound from the first second on. If a capture takes
    longer than expected, the difference is a debt. Ranks that have to agree get a share of 0, as
    their clocks differ.

    Args:
        share: 0 allows no capture, 1 sets no limit.
        burst: seconds of captures that may follow each other after an idle time.
        expected: estimated seconds of the first capture.
    """

    def __init__(self, share: float, burst: float = 0.2, expected: float = 0.05) -> None:
        self.share, self.burst = share, burst
        self._expected = expected
        self._credit = 0.0
        self._last: float | None = None

    @property
    def plenty(self) -> bool:
        """Whether there is no limit, or credit is full, so that waiting earns nothing."""
        return self.share >= 1 or self._credit >= self.burst

    def start(self, now: float) -> None:
        """Begin to earn credit at `now`, in seconds of a monotonic clock."""
        self._credit, self._last = 0.0, now

    def ready(self, now: float) -> bool:
        """Whether there is credit for one capture of the expected length."""
        if self._last is not None:
            earned = self.share * (now - self._last)
            self._credit = min(self.burst, self._credit + earned)
        self._last = now
        if self.share >= 1:
            return True
        # If a capture is longer than the burst, full credit has to suffice.
        return self.share > 0 and self._credit >= min(self._expected, self.burst)

    def spent(self, seconds: float) -> None:
        """Pay for a capture, in seconds; credit may become negative."""
        self._credit -= seconds
        self._expected = max(seconds, 0.5 * (self._expected + seconds))
