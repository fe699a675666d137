"""Chooses how a hit comes to the device, by what copies and prefill have been measured to take."""

from __future__ import annotations

import enum
from dataclasses import dataclass

WEIGHT = 0.2
"""Weight of a new measurement in the moving averages."""

MIN_BYTES = 1 << 20
"""Smaller copies measure latency, not bandwidth."""

MIN_TOKENS = 256
"""Steps of fewer tokens measure decoding, not prefill."""


PARTIAL_GAIN = 0.2
"""Least share of the time of loading all, or of computing all, that a part has to save.

Where copies are many times faster than prefill, it never does, and a few more tokens of prefill
cost more than their share: a kernel has a smallest size, and a batch that outgrows its graph is
launched piece by piece.
"""


class Rate:
    """A quantity a second: the ratio of two exponential moving averages.

    A mean of ratios would follow the smallest times, which are the least exact.

    Args:
        initial: value before the first measurement, which replaces it.
        minimum: smallest amount that counts as a measurement.
    """

    def __init__(self, initial: float, minimum: float) -> None:
        self.value = initial
        self.samples = 0
        self._minimum = minimum
        self._amount = self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """Take in that ``amount`` took ``seconds``."""
        if amount < self._minimum or seconds <= 0:
            return
        if not self.samples:
            self._amount, self._seconds = amount, seconds
        self._take(amount, seconds)

    def at_most(self, amount: float, seconds: float) -> None:
        """Take in that after ``seconds`` no more than ``amount`` had come, if that is news."""
        if seconds > 0 and amount / seconds < self.value:
            if not self.samples:
                self._amount, self._seconds = self.value * seconds, seconds
            self._take(max(amount, 1.0), seconds)

    def _take(self, amount: float, seconds: float) -> None:
        self._amount += WEIGHT * (amount - self._amount)
        self._seconds += WEIGHT * (seconds - self._seconds)
        self.value = self._amount / self._seconds
        self.samples += 1


class LoadMode(enum.Enum):
    """How a hit comes to the device."""

    ASYNC = "async"
    """Whole, before the request runs; steps of others go on meanwhile."""

    LAYERWISE = "layerwise"
    """During the request's first step, a layer ahead of the computation."""

    RECOMPUTE = "recompute"
    """Not at all."""


@dataclass(frozen=True)
class Hit:
    """What is to be decided about.

    Attributes:
        tokens: that could be loaded.
        num_bytes: their pages, on all ranks together divided by the ranks: what one link carries.
        rest_tokens: that the request has to compute in any case.
        others: requests that run beside it, and wait while a step waits for copies.
        queued_bytes: loads that go before it on the link.
        step_tokens: that its step computes already, of requests whose loads are in that queue.
    """

    tokens: int
    num_bytes: int
    rest_tokens: int
    others: int = 0
    queued_bytes: int = 0
    step_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """What was decided: the mode, and how many of the hit's tokens to load."""

    mode: LoadMode
    tokens: int


class CostModel:
    """Learns rates and compares ways.

    Args:
        host_gbps: GB/s from host to device, until measured.
        disk_gbps: GB/s from storage, until measured.
        prefill_tokens_per_second: until measured.
    """

    def __init__(
        self, host_gbps: float, disk_gbps: float, prefill_tokens_per_second: float
    ) -> None:
        self.load = Rate(host_gbps * 1e9, MIN_BYTES)
        self.store = Rate(host_gbps * 1e9, MIN_BYTES)
        self.disk = Rate(disk_gbps * 1e9, MIN_BYTES)
        self.prefill = Rate(prefill_tokens_per_second, MIN_TOKENS)
        self.steps = Rate(100.0, 1)
        """Steps a second, of those with few tokens: they read the weights and compute little."""

    def copied(self, num_bytes: int, seconds: float, load: bool) -> None:
        """Take in a measured copy; until a load was measured, stores stand for the link."""
        (self.load if load else self.store).observe(num_bytes, seconds)
        if not self.load.samples and self.store.samples:
            self.load.value = self.store.value

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in how long the device took for a step of so many tokens."""
        rate, amount = (self.prefill, tokens) if tokens >= MIN_TOKENS else (self.steps, 1)
        rate.observe(amount, seconds)

    def learned(self) -> dict[str, float]:
        """The rates in use, as gauges."""
        return {
            "learned_load_gbps": self.load.value / 1e9,
            "learned_prefill_tokens_per_second": self.prefill.value,
            "learned_step_seconds": 1 / self.steps.value,
        }

    def seconds_to_load(self, num_bytes: int) -> float:
        """Seconds that the link needs."""
        return num_bytes / self.load.value

    def seconds_to_compute(self, tokens: int) -> float:
        """Seconds that prefill needs."""
        return tokens / self.prefill.value

    def seconds_from_disk(self, num_bytes: int, queued_bytes: int = 0) -> float:
        """Seconds until storage has delivered, behind what is queued."""
        return (num_bytes + queued_bytes) / self.disk.value

    def worth_reading(self, tokens: int, num_bytes: int, queued_bytes: int) -> bool:
        """Whether storage delivers sooner than prefill recomputes."""
        return self.seconds_from_disk(num_bytes, queued_bytes) < self.seconds_to_compute(tokens)

    def choose(self, hit: Hit) -> Plan:
        """The way with the least seconds to the first token, others' waiting included."""
        queue = self.seconds_to_load(hit.queued_bytes)
        load = queue + self.seconds_to_load(hit.num_bytes)
        step = 1.0 / self.steps.value
        rest = max(step, self.seconds_to_compute(hit.rest_tokens))
        shared = max(step, self.seconds_to_compute(hit.rest_tokens + hit.step_tokens))
        seconds = {
            # The request is scheduled again in a step after the one that saw the load end.
            LoadMode.ASYNC: load + step + rest,
            # Copies and computation overlap; what sticks out is waited for by every request.
            LoadMode.LAYERWISE: max(load, shared) + max(0.0, load - shared) * hit.others,
            # Every request waits for what the device computes twice.
            LoadMode.RECOMPUTE: self.seconds_to_compute(hit.tokens) * (1 + hit.others) + rest,
        }
        mode = min(seconds, key=lambda way: seconds[way])
        tokens = hit.tokens
        if mode is LoadMode.RECOMPUTE:
            partial = self._balanced(hit, queue)
            if partial < PARTIAL_GAIN * (hit.tokens + hit.rest_tokens):
                return Plan(mode, 0)
            return Plan(LoadMode.LAYERWISE, partial)
        if mode is LoadMode.LAYERWISE and load > shared:
            fewer = self._balanced(hit, queue)
            if (
                queue + self.seconds_to_load(hit.num_bytes) * fewer / hit.tokens
                < (1 - PARTIAL_GAIN) * load
            ):
                tokens = fewer
        return Plan(mode, tokens) if tokens else Plan(LoadMode.RECOMPUTE, 0)

    def _balanced(self, hit: Hit, queue: float) -> int:
        """Tokens to load so that copying them takes as long as computing all others."""
        copy = self.seconds_to_load(hit.num_bytes) / hit.tokens
        compute = 1.0 / self.prefill.value
        total = (hit.tokens + hit.rest_tokens + hit.step_tokens) * compute
        return max(0, min(hit.tokens, int((total - queue) / (copy + compute))))
