"""Which graphs are worth a capture, by counts that decay, and how much time captures may take."""

from collections import Counter
from collections.abc import Container, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Admission(Generic[K]):
    """Counts keys, and decides which get a graph and which give theirs up. Counts are halved every
    `half_life` steps. A new key takes the place of another only if its count is higher (TinyLFU,
    arXiv:1512.00727): plain LRU would capture at nearly every step if the budget is tight.
    `refused` has the keys that get no graph, and why."""

    def __init__(self, min_hits: int, half_life: int = 4096) -> None:
        self.min_hits = min_hits
        self.refused: dict[K, str] = {}
        self._for_now: set[K] = set()
        self._half_life = half_life
        self._steps = 0
        self._counts: Counter[K] = Counter()

    def see(self, keys: Iterable[K]) -> None:
        self._counts.update(keys)
        self._steps += 1
        if self._steps % self._half_life == 0:
            self._counts = Counter({key: n // 2 for key, n in self._counts.items() if n > 1})
            for key in self._for_now:
                self.refused.pop(key, None)
            self._for_now.clear()

    def wants(self, key: K) -> bool:
        return self._counts[key] >= self.min_hits and key not in self.refused

    def is_hottest(self, key: K, live: Container[K]) -> bool:
        """Whether no other key that may still get a graph has a higher count. Captures are
        rationed, and the key that happens to come first is seldom the best one."""
        mine = self._counts[key]
        return not any(
            count > mine and other not in live and other not in self.refused
            for other, count in self._counts.items()
        )

    def refuse(self, key: K, reason: str, for_now: bool = False) -> None:
        """Never capture this key, or with `for_now` not before counts are halved."""
        self.refused[key] = reason
        if for_now:
            self._for_now.add(key)

    def victim(self, live: Iterable[K], newcomer: K) -> K | None:
        """The captured key with the lowest count; None if it is not lower than the newcomer's."""
        least = min(live, key=self._counts.__getitem__, default=None)
        if least is None or self._counts[least] >= self._counts[newcomer]:
            return None
        return least


class TimeShare:
    """Captures take at most a share of the wall time since `start`, idle time included.

    Credit starts at zero, so the share is a bound from the first second on. If a capture takes
    longer than expected, the difference is a debt. Ranks that must agree get 0, as clocks differ.
    `share`: 0 allows no capture, 1 sets no limit. `burst`: seconds of captures that may follow each
    other after an idle time. `expected`: estimated seconds of the first capture."""

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
