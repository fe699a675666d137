"""The device memory of captured graphs: what they take, and what the next one would take."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm_graft.graph_runners.vision.capture.device_memory import (
    LARGE,
    Arena,
    ByteBudget,
    scratch_bytes,
    segment_bytes,
)
from vllm_graft.graph_runners.vision.capture.graph_backend import GraphBackend
from vllm_graft.graph_runners.vision.graphs.vision_batch import VisionBatch
from vllm_graft.graph_runners.vision.towers.tower import Tower

_EXACT_ROOM, _MORE_ROOM, _TIGHT = 0.15, 0.35, 128 << 20
"""The largest bucket leaves at least 15 % of the budget, and 35 % of what exceeds 128 MiB. Exact
graphs need this room, and so do smaller buckets, which cut the pool into other pieces."""

_SPARE = 0.03
"""The fraction of the budget that is never given away, as the pool fragments."""


class MemoryNeed(NamedTuple):
    """Device memory of a pass over so many patches; to a good approximation it grows with them.
    `static`: bytes of each static buffer that the graph of such a pass allocates. `peak`: bytes
    that the pass takes beyond those already in use, its output included."""

    rows: int
    static: Sequence[int]
    peak: int

    def scaled(self, rows: int) -> "MemoryNeed":
        times = rows / self.rows
        return MemoryNeed(rows, [int(times * size) for size in self.static], int(times * self.peak))


def measure_need(tower: Tower, backend: GraphBackend, rows: int) -> MemoryNeed | None:
    """Run eager passes on noise of at most `rows` patches; None if the tower has no noise."""
    inputs = tower.sample(rows)
    if inputs is None:
        return None
    batch = VisionBatch.read(tower, inputs)
    tower.eager(inputs, batch.indices)
    _, peak = backend.peak(lambda: tower.eager(inputs, batch.indices))
    static = [value.nbytes for value in tower.constants(batch.items).values()]
    static += [sum(t.nbytes for t in ts) for ts in tower.data(inputs, batch.indices).values()]
    return MemoryNeed(batch.rows, static, peak)


class GraphMemory:
    """Accounts for the memory of graphs within a budget, and estimates the need of the next graph.

    The methods take the sizes, in bytes, of the static buffers that live graphs do not share.

    Args:
        backend: knows what torch has reserved.
        limit: bytes of static buffers and pool together.
        roomy: whether the largest bucket leaves much of the budget to other graphs.

    Attributes:
        budget: bytes by owner: ``pool``, ``static``, ``overhead``, and ``spoilt`` pools.
        peak: bytes that the largest captured pass took at once.
        margin: factor on estimates, for fragments; an overflow raises it.
    """

    def __init__(self, backend: GraphBackend, limit: int, roomy: bool) -> None:
        self.budget = ByteBudget(limit)
        self.arena = Arena(backend.device)
        self.peak = 0
        self.margin = 1.1
        self._backend = backend
        self._more = _MORE_ROOM * max(0, limit - _TIGHT) if roomy else 0.0
        self._covered = 0

    def open(self, pool: Any) -> None:
        before = self._backend.reserved() - self._backend.overhead
        self._backend.open(pool)
        self.budget.owners["pool"] = self._backend.reserved() - self._backend.overhead - before

    def close(self) -> None:
        """Free the shared buffers and the pool; the estimates' margin is kept."""
        self.arena.clear()
        self.budget.owners.clear()
        self.peak = self._covered = 0
        self._backend.close()

    # What is taken

    def charge(self, own: Sequence[int]) -> None:
        """Account for the overhead and for all static buffers."""
        self.budget.owners["overhead"] = self._backend.overhead
        if self._backend.pools_static:
            self.budget.owners["static"] = self._backend.reserved_static
        else:
            self.budget.owners["static"] = sum((*own, *self.arena.sizes))

    def add_capture(self, grown: int, peak: int, leave: int) -> bool:
        """Account for a capture; False if less than `leave` bytes are left. The pool grew by
        `grown` bytes, and the captured pass takes `peak` bytes at once."""
        self.budget.owners["pool"] += grown
        self.peak = max(self.peak, peak)
        if self.budget.free < leave:
            return False
        self._covered = max(self._covered, scratch_bytes(self.margin * self.peak))
        return True

    def spoil_pool(self, grown: int) -> None:
        """A capture failed, so its pool stays as it is and the next capture opens another one."""
        self.budget.owners["spoilt"] += self.budget.owners["pool"] + grown
        self.budget.owners["pool"] = 0
        self.peak = self._covered = 0

    # What is left

    @property
    def spare(self) -> int:
        """Bytes that are never given away: one large segment at most."""
        return min(LARGE, int(_SPARE * self.budget.limit))

    @property
    def least_room(self) -> int:
        """Bytes that the largest bucket has to leave, once it is known what it took."""
        return int(max(self.spare, self._more))

    @property
    def holds_smaller_bucket(self) -> bool:
        return self.budget.free >= max(self.spare, self._more / 3)

    def fits_bucket(self, need: MemoryNeed, own: Sequence[int]) -> bool:
        """Whether the largest bucket would leave the room that other graphs need."""
        room = int(max(_EXACT_ROOM * self.budget.limit, self._more))
        return self._static_need(need, own) + self._scratch_need(need, room) <= self.budget.free

    def fits_exact(self, need: MemoryNeed, own: Sequence[int]) -> bool:
        """Whether an exact graph would leave the spare bytes."""
        bytes_needed = self._static_need(need, own) + self._scratch_need(need)
        return bytes_needed <= self.budget.free - self.spare

    def _static_need(self, need: MemoryNeed, own: Sequence[int]) -> int:
        """Bytes that the device gives for new static buffers, beside those that are there."""
        if not self._backend.pools_static:
            return sum(need.static)
        found = segment_bytes([*own, *self.arena.sizes, *need.static])
        return max(0, found - self._backend.reserved_static)

    def _scratch_need(self, need: MemoryNeed, room: int = 0) -> int:
        """Bytes that the pool grows by for one more pass, and `room` bytes beside it. A smaller
        graph fits into what a larger one has left in the pool, its output included. The pool counts
        as at least as large as was estimated for the graphs that it holds."""
        found = scratch_bytes(self.margin * max(need.peak, self.peak) + room)
        return max(0, found - max(self.budget.owners["pool"], self._covered))
