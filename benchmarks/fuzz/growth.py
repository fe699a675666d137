"""How much of a server grows with its requests, judged beside the reference that got the same.

Each judge is a row of `LIMITS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.fuzz.watch import Call, calls, watched

STEP_MS = 5.0
"""Most CPU time of one call on a step's thread for a request's own work."""
STEP_WORK = "add_request"
"""A function whose name ends so must be measured, or the time of a step was not judged at all."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a server at one moment.

    Attributes:
        memory: resident bytes of all its processes, each process's share of shared pages alone.
        threads: of all its processes.
        log: bytes.
        steps: bytes of the file that `watch` writes.
    """

    memory: int
    threads: int
    log: int
    steps: int

    @classmethod
    def of(cls, group: int, log: Path, steps: Path) -> Sizes:
        """Measure the processes of a process group."""
        memory = threads = 0
        for status in _processes(group):
            fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if "RssAnon" in fields:
                memory += 1024 * int(fields["RssAnon"].split()[0])
                threads += int(fields["Threads"])
        return cls(memory, threads, *(p.stat().st_size if p.exists() else 0 for p in (log, steps)))


def _processes(group: int) -> Iterator[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[2]) == group:
                yield (folder / "status").read_text()
        except OSError:
            continue  # It has just ended.


@dataclass
class Watched:
    """Growth and slow calls of a server.

    Attributes:
        asked: requests between the first two sizes.
        flooded: requests between the last two, large ones.
        sizes: after the warm-up, after the requests, after the flood.
        slow: calls on steps' threads after the warm-up that took a millisecond or more.
        functions: that were measured.
    """

    asked: int = 0
    flooded: int = 0
    sizes: list[Sizes] = field(default_factory=list)
    slow: list[Call] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)

    def read(self, steps: Path) -> None:
        """Read what `watch` wrote."""
        self.slow = calls(steps, self.sizes[0].steps)
        self.functions = watched(steps)


Measure = Callable[[Watched, Watched], float]
"""A figure of an arm (the first argument), beside the reference's where both do the same."""
MIB = 1 << 20

LIMITS: Mapping[str, tuple[float, Measure]] = {
    "step_ms": (STEP_MS, lambda arm, ref: max((call.ms for call in arm.slow), default=0.0)),
    "memory_mib": (96, lambda arm, ref: _over("memory", arm, ref, 0, 1) / MIB),
    "flood_mib": (24, lambda arm, ref: _over("memory", arm, ref, 1, 2) / MIB),
    "log_bytes": (1000, lambda arm, ref: _over("log", arm, ref, 0, 1) / arm.asked),
    "flood_log_bytes": (1000, lambda arm, ref: _over("log", arm, ref, 1, 2) / arm.flooded),
    "threads": (8, lambda arm, ref: _over("threads", arm, ref, 0, 2)),
}
"""Most that is allowed, and how it is measured. Bytes of logs are by request.

Memory of the requests may grow by caches that fill up. That of the flood, whose 16 texts of 2 MB
per kind are 32 MiB, may not.
"""


def _over(name: str, arm: Watched, reference: Watched, begin: int, end: int) -> int:
    """Return by how much more than the reference an arm has grown."""
    grown = (
        getattr(it.sizes[end], name) - getattr(it.sizes[begin], name) for it in (arm, reference)
    )
    return int(next(grown) - next(grown))


def figures(arm: Watched, reference: Watched) -> dict[str, float]:
    """Measure an arm by all judges."""
    return {name: round(measure(arm, reference), 2) for name, (_, measure) in LIMITS.items()}


def judged(arm: Watched, reference: Watched, kinds: Callable[[int], Sequence[str]]) -> list[str]:
    """List what is over its limit; `kinds` names the features of a request's number."""
    found = figures(arm, reference)
    wrong = [
        f"{name} is {found[name]:g}, more than {limit:g}"
        for name, (limit, _) in LIMITS.items()
        if found[name] > limit and name != "step_ms"
    ]
    if not any(name.endswith(STEP_WORK) for name in arm.functions):
        wrong.append("nothing measured the time of a step")
    over: dict[str, float] = {}
    for call in sorted(arm.slow, key=lambda call: -call.ms):
        if call.ms > STEP_MS:
            of = list(kinds(call.number)) if call.number is not None else "no request"
            over.setdefault(f"{call.name} for {of}", call.ms)
    return wrong + [f"{what} took {ms:g} ms of CPU" for what, ms in [*over.items()][:8]]
