"""The cost model chooses how to load a hit, from measured times of copies and of prefill."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_graft.base.values import lever

HOST_GBPS = 20.0
"""GB/s between host and device, until they are measured."""

DISK_GBPS = 2.0
"""GB/s from storage, until they are measured."""

PREFILL_RATE = 20_000
"""Tokens of prompts that a step computes in a second, until they are measured."""

PREFILL_LEVER = "VLLM_GRAFT_PREFILL_RATE"
"""Environment variable with another `PREFILL_RATE`. With a low one all hits are worth a load."""

WEIGHT = 0.2
"""Weight of a new measurement in the moving averages."""

MIN_BYTES = 1 << 20
"""Least bytes of a copy that counts as a measurement. Smaller copies measure latency."""

MIN_TOKENS = 256
"""Least tokens of a step that measures prefill. Smaller steps measure decoding."""

PARTIAL_GAIN = 0.2
"""Least fraction of the time, for loading or for computing everything, that a part has to save. A
few more tokens of prefill may cost more than their proportion, because a kernel has a minimal cost,
and a batch that exceeds its CUDA graph is launched kernel by kernel."""


class Rate:
    """An amount per second: the ratio of two exponential moving averages. A mean of ratios would
    mostly follow the shortest times, which are the least exact. ``initial`` is the rate before the
    first measurement of at least ``minimum``."""

    def __init__(self, initial: float, minimum: float) -> None:
        self.value = initial
        self.samples = 0
        self._minimum = minimum
        self._amount = self._seconds = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        if amount < self._minimum or seconds <= 0:
            return
        if not self.samples:
            self._amount, self._seconds = amount, seconds
        self._take(amount, seconds)

    def at_most(self, amount: float, seconds: float) -> None:
        """Take in that at most ``amount`` was done in ``seconds``, if that lowers the rate."""
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
    """How a hit is loaded to the device."""

    ASYNC = "async"
    """The whole prefix is loaded before the request runs. Other requests run meanwhile."""

    LAYERWISE = "layerwise"
    """It is loaded during the request's first step, layer by layer, ahead of the computation."""

    RECOMPUTE = "recompute"
    """It is not loaded."""


@dataclass(frozen=True)
class Hit:
    """A hit, and the circumstances that count for its load.

    Attributes:
        num_bytes: bytes of the pages on one rank, which go over one link.
        rest_tokens: number of tokens that the request has to compute in any case.
        others: number of other running requests. They wait while a step waits for copies.
        queued_bytes: bytes of loads that are before this one on the link.
        step_tokens: number of tokens that the next step computes for other requests that begin.
    """

    tokens: int
    num_bytes: int
    rest_tokens: int
    others: int = 0
    queued_bytes: int = 0
    step_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """The decision about a hit: how to load how many of its tokens."""

    mode: LoadMode
    tokens: int


class CostModel:
    """Learns rates from measurements, and chooses the fastest mode for a hit."""

    def __init__(self) -> None:
        self.load = Rate(HOST_GBPS * 1e9, MIN_BYTES)
        self.store = Rate(HOST_GBPS * 1e9, MIN_BYTES)
        self.disk = Rate(DISK_GBPS * 1e9, MIN_BYTES)
        self.prefill = Rate(lever(PREFILL_LEVER) or PREFILL_RATE, MIN_TOKENS)
        self.steps = Rate(100.0, 1)
        """Steps per second, measured on steps with few tokens, which mostly read the weights."""

    def copied(self, num_bytes: int, seconds: float, load: bool) -> None:
        """Take in a measured copy. Until a load was measured, stores measure the link for it."""
        (self.load if load else self.store).observe(num_bytes, seconds)
        if not self.load.samples and self.store.samples:
            self.load.value = self.store.value

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in the device's seconds for a step of ``tokens`` tokens."""
        rate, amount = (self.prefill, tokens) if tokens >= MIN_TOKENS else (self.steps, 1)
        rate.observe(amount, seconds)

    def learned(self) -> dict[str, float]:
        """The current rates, as gauges by name."""
        return {
            "learned_load_bytes_per_second": self.load.value,
            "learned_prefill_tokens_per_second": self.prefill.value,
            "learned_step_seconds": 1 / self.steps.value,
        }

    def seconds_to_load(self, num_bytes: int) -> float:
        return num_bytes / self.load.value

    def seconds_to_compute(self, tokens: int) -> float:
        return tokens / self.prefill.value

    def worth_reading(self, tokens: int, num_bytes: int, queued_bytes: int) -> bool:
        """Whether reading from storage, after the queued bytes, is faster than recomputing."""
        seconds = (num_bytes + queued_bytes) / self.disk.value
        return seconds < self.seconds_to_compute(tokens)

    def choose(self, hit: Hit) -> Plan:
        """Choose the mode with the fewest seconds to the first token, and of others' waiting."""
        queue = self.seconds_to_load(hit.queued_bytes)
        load = queue + self.seconds_to_load(hit.num_bytes)
        step = 1.0 / self.steps.value
        rest = max(step, self.seconds_to_compute(hit.rest_tokens))
        shared = max(step, self.seconds_to_compute(hit.rest_tokens + hit.step_tokens))
        seconds = {
            # The request is scheduled in a step after the one in which the load ended. It waits for
            # what the others compute in the step to come, just as if it took part in that step.
            LoadMode.ASYNC: max(load, self.seconds_to_compute(hit.step_tokens)) + step + rest,
            # Copies overlap with computation. If they take longer, every request waits for them.
            LoadMode.LAYERWISE: max(load, shared) + max(0.0, load - shared) * hit.others,
            # Every request waits while the device recomputes.
            LoadMode.RECOMPUTE: self.seconds_to_compute(hit.tokens) * (1 + hit.others) + rest,
        }
        mode = min(seconds, key=lambda candidate: seconds[candidate])
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
        """Number of tokens to load so that their copies take as long as computing the others."""
        copy = self.seconds_to_load(hit.num_bytes) / hit.tokens
        compute = 1.0 / self.prefill.value
        total = (hit.tokens + hit.rest_tokens + hit.step_tokens) * compute
        return max(0, min(hit.tokens, int((total - queue) / (copy + compute))))


class StepClock:
    """Matches steps' tokens with their times, which the ranks report only later, or never."""

    def __init__(self) -> None:
        self._number = 0
        self._tokens: dict[int, int] = {}

    def begin(self, tokens: int) -> int:
        """Note a step of ``tokens`` tokens, 0 to ignore its time; return its number, from 1 on."""
        self._number += 1
        if tokens:
            self._tokens[self._number] = tokens
        return self._number

    def ended(self, seconds: Mapping[int, float]) -> list[tuple[int, float]]:
        """``(tokens, seconds)`` of each step whose time, reported by its number, counts."""
        known = []
        for number in sorted(seconds):
            # Ranks report steps in order, so no earlier step will be reported any more.
            for earlier in [step for step in self._tokens if step < number]:
                del self._tokens[earlier]
            if number in self._tokens:
                known.append((self._tokens.pop(number), seconds[number]))
        return known
