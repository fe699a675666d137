"""The captured graphs of one tower: captures within a budget, verifies, measures, evicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from vllm_graft.base.log import logger
from vllm_graft.graph_runners.vision.graphs.embedding_check import disagreement, same_bits
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.allocator import LARGE, scratch_bytes, segment_bytes
from vllm_graft.graph_runners.vision.capture.arena import Arena
from vllm_graft.graph_runners.vision.capture.budget import ByteBudget
from vllm_graft.graph_runners.vision.capture.graph_backend import Beside, GraphBackend
from vllm_graft.graph_runners.vision.graphs.graph import BucketGraph, ExactGraph
from vllm_graft.graph_runners.vision.graphs.memory_need import Need, need_of
from vllm_graft.graph_runners.vision.graphs.padding_metadata import MetadataCache
from vllm_graft.graph_runners.vision.replay_plan import LayoutKey, Step
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Inputs, Item, Tower
from vllm_graft.graph_runners.vision.graphs.vision_stats import VitStats

MIN_GAIN = 0.97
"""A graph is kept if it takes at most this share of the eager time."""

_EXACT_ROOM, _MORE_ROOM, _TIGHT = 0.15, 0.35, 128 << 20
"""Shares of the budget, and of what it is above 128 MiB, that the largest bucket leaves at least.

They are for exact graphs, and for smaller buckets, which cut the pool into other pieces. A pass
over few patches gains more by an exact graph than one over many by a padded one.
"""

_BESIDE = 0.15
"""Share of the budget that the means to run something beside something else may take."""

_SPARE = 0.03
"""Share of the budget, a segment at most, that is not given away: the pool gets fragments."""

Outputs = list[torch.Tensor]


class Measured(NamedTuple):
    """An eager pass."""

    outputs: Outputs
    seconds: float
    peak: int
    """Bytes that it needed beyond those in use."""


class GraphStore:
    """Graphs of one tower in one pool.

    Args:
        tower: what is captured.
        backend: where.
        limit: bytes of static buffers and pool together.
        admission: counts, and the list of refusals.
        stats: where captures and drops are counted.
        verify: whether the first replay of each graph is compared with the eager pass.
        timing: whether a graph that is not faster than the eager pass is dropped. Not for ranks
            that have to agree.
        lockstep: whether other ranks have to have the same graphs.
        roomy: whether the largest bucket leaves much to others, as nobody has asked for its size.
    """

    def __init__(
        self,
        tower: Tower,
        backend: GraphBackend,
        limit: int,
        admission: Admission[LayoutKey],
        stats: VitStats,
        *,
        verify: bool,
        timing: bool,
        lockstep: bool = False,
        roomy: bool = True,
    ) -> None:
        self.tower, self.backend, self.admission, self.stats = tower, backend, admission, stats
        self.verify, self.timing, self._lockstep = verify, timing, lockstep
        self._more = _MORE_ROOM * max(0, limit - _TIGHT) if roomy else 0.0
        self.budget = ByteBudget(limit)
        self.arena = Arena(backend.device)
        self.exact: dict[LayoutKey, ExactGraph] = {}
        self.buckets: dict[int, BucketGraph] = {}
        self.metadata = MetadataCache(backend, limit)
        self._peak = self._covered = 0
        self._margin = 1.1
        self._needs: dict[int, Need | None] = {}

    def open(self, pool: Any) -> None:
        """Begin with no graph; `pool` is torch's handle."""
        before = self.backend.reserved() - self.backend.overhead
        self.backend.open(pool)
        self.metadata.open()
        self.budget.set("pool", self.backend.reserved() - self.backend.overhead - before)
        self._charge()

    def clear(self) -> None:
        """Drop all graphs and the memory; counts and refusals are kept."""
        for graph in (*self.exact.values(), *self.buckets.values()):
            graph.drop()
        self.exact.clear()
        self.buckets.clear()
        self.arena.clear()
        self.metadata.clear()
        self.budget.clear()
        self._peak = self._covered = 0
        self.backend.close()

    def beside(self) -> Beside | None:
        """Let regions run something beside something else, if the budget is large enough.

        Not where ranks share a tower: two of its sums over ranks at a time are one too many.
        """
        if self._lockstep:
            return None
        found = self.backend.beside(int(_BESIDE * self.budget.limit))
        self._charge()
        return found

    def restart(self) -> None:
        """Begin anew in a pool of our own; the old one's memory goes back to the device."""
        self.clear()
        self.open(None)

    # Replays

    def replay_exact(self, step: Step, inputs: Inputs, items: Sequence[Item]) -> Outputs | None:
        """Embeddings of the step's items; None if the inputs are not what was captured."""
        graph = self.exact[step.key]  # type: ignore[index]
        if not graph.load(self.tower.data(inputs, step.indices)):
            return None
        return self._read(graph.replay(), step, inputs, items)

    def replay_bucket(self, step: Step, inputs: Inputs, items: Sequence[Item]) -> Outputs | None:
        """Embeddings of the step's items; None if they do not fit into the bucket."""
        graph = self.buckets[step.bucket]  # type: ignore[index]
        chosen = [items[index] for index in step.indices]
        constants = self._metadata(graph, chosen)
        pieces = self.tower.data(inputs, step.indices)
        if constants is None or not graph.load(constants, step.rows, pieces):
            return None
        return self._read(graph.replay(), step, inputs, items)

    def _metadata(self, graph: BucketGraph, items: Sequence[Item]) -> Buffers | None:
        """Of a padded batch."""
        key = (graph.rows, *(item.layout for item in items))
        found = self.metadata.get(key)
        if found is None:
            found = graph.metadata(items)
            if found is not None:
                self.metadata.keep(key, found)
        return found

    def _read(self, output: Any, step: Step, inputs: Inputs, items: Sequence[Item]) -> Outputs:
        """Clones: the static output is written anew by the next replay of any graph."""
        parts = self.tower.split(output, inputs, step.indices, items)
        return [part.clone() for part in parts]

    # Captures

    def capture_bucket(self, rows: int, segments: int, gain: bool) -> str | None:
        """Capture a bucket with noise for inputs; why it was not kept, None if it was."""
        inputs = self.tower.sample(rows)
        if inputs is None:
            return "no_sample"
        if self.buckets and self.budget.free < max(self._spare, self._more / 3):
            return "memory"
        items = self.tower.items(inputs)
        indices = tuple(range(len(items)))
        step = Step(indices, sum(item.rows for item in items), bucket=rows)
        if gain:
            self.tower.eager(inputs, indices)  # Compiles and loads kernels, which is not timed.
        eager = self.measure(inputs, indices)
        pieces = self.tower.data(inputs, indices)
        constants = BucketGraph.filled(self.tower, rows, items[0])
        with self.backend.static():
            graph = BucketGraph(self.tower, self.arena, rows, pieces, constants, segments)
        self.tower.forward(graph.buffers)
        if not self._capture(graph, eager.peak, 0 if self.buckets else self._least_room):
            return "memory"
        self.buckets[rows] = graph
        why = self._judge(step, inputs, items, eager, gain)
        if why:
            self.drop_bucket(rows)
        return why

    def capture_exact(
        self,
        step: Step,
        inputs: Inputs,
        items: Sequence[Item],
        eager: Measured | None = None,
    ) -> str | None:
        """Capture an exact graph with these inputs; why it was not kept, None if it was.

        Args:
            step: whose key is captured.
            inputs: of the whole batch.
            items: of the whole batch.
            eager: the eager pass over the step's items, if there was one.
        """
        key: LayoutKey = step.key  # type: ignore[assignment]
        chosen = [items[index] for index in step.indices]
        if eager is None:
            eager = self.measure(inputs, step.indices)
        constants = self.tower.constants(chosen)
        pieces = self.tower.data(inputs, step.indices)
        new = [value.nbytes for value in constants.values()]
        new += [
            self.arena.missing(name, sum(len(t) for t in tensors), tensors[0])
            for name, tensors in pieces.items()
            if tensors[0].ndim
        ]
        if not self._make_room(key, new, eager.peak):
            return "no_room"
        with self.backend.static():
            graph = ExactGraph(self.tower, self.arena, pieces, constants)
        if not self._capture(graph, eager.peak):
            return "memory"
        self.exact[key] = graph
        why = self._judge(step, inputs, items, eager, True)
        if why:
            self.drop_exact(key)
        return why

    def measure(self, inputs: Inputs, indices: Sequence[int]) -> Measured:
        """The eager pass over these items; waits for the device."""
        (outputs, peak), seconds = self.backend.timed(
            lambda: self.backend.peak(lambda: self.tower.eager(inputs, indices))
        )
        return Measured(outputs, seconds, peak)

    def pays(self, ours: float, eager: Measured, inputs: Inputs, indices: Sequence[int]) -> bool:
        """Whether `ours`, seconds of replays, is enough less than the eager pass takes."""
        theirs = eager.seconds
        if ours > 0.5 * theirs:
            # In doubt: the eager pass may have been the first of its shapes.
            theirs = min(theirs, self.measure(inputs, indices).seconds)
        return ours <= MIN_GAIN * theirs

    def drop_exact(self, key: LayoutKey) -> None:
        """Let one graph go."""
        self.exact.pop(key).drop()
        self._charge()

    def drop_bucket(self, rows: int) -> None:
        """Let one bucket go."""
        self.buckets.pop(rows).drop()
        self._charge()

    @property
    def _room(self) -> int:
        """Bytes that the largest bucket should leave."""
        return int(max(_EXACT_ROOM * self.budget.limit, self._more))

    @property
    def _least_room(self) -> int:
        """Bytes that it has to leave, when it is known what it took."""
        return int(max(self._spare, self._more))

    @property
    def _spare(self) -> int:
        return min(LARGE, int(_SPARE * self.budget.limit))

    def _capture(self, graph: ExactGraph | BucketGraph, peak: int, leave: int = 0) -> bool:
        """False if it left less than `leave`; then there is no graph at all any more."""
        self._charge(graph)
        before = self.backend.reserved()
        try:
            graph.capture(self.backend)
        except BaseException:
            # Its pool cannot be used any more.
            grown = self.backend.reserved() - before
            self.budget.add("spoilt", self.budget.of("pool") + grown)
            self.budget.set("pool", 0)
            self._peak = self._covered = 0
            graph.drop()
            self._charge()
            raise
        self.budget.add("pool", self.backend.reserved() - before)
        self._peak = max(self._peak, peak)
        if self.budget.free >= leave:
            self._covered = max(self._covered, scratch_bytes(self._margin * self._peak))
            return True
        graph.drop()
        self._overflow()
        return False

    def _overflow(self) -> None:
        """A pool does not shrink: it goes, with its graphs, and estimates get more careful."""
        self._margin *= 1.25
        lost = len(self.exact) + len(self.buckets)
        if lost and self._lockstep:
            # The other ranks would not drop theirs.
            self._charge()
            return
        if lost:
            self.stats.dropped["overflow"] += lost
            logger.warning(
                "vision graphs took %d MiB of %d: all %d are dropped",
                self.budget.used >> 20,
                self.budget.limit >> 20,
                lost,
            )
        self.restart()

    # Room

    def fits(self, rows: int) -> bool:
        """Whether a bucket of so many rows leaves room for exact graphs, by a smaller one's need.

        Runs the eager pass on noise, once for all sizes.
        """
        sample = min(rows, 1024)
        if sample not in self._needs:
            self._needs[sample] = need_of(self.tower, self.backend, sample)
        found = self._needs[sample]
        if found is None:
            return False
        times = rows / found.rows
        room = self._room
        need = self._static_need([int(times * size) for size in found.static])
        return need + self._scratch_need(int(times * found.peak), room) <= self.budget.free

    def _make_room(self, key: LayoutKey, new: Sequence[int], peak: int) -> bool:
        """Evict keys that are counted less; False, evicting nothing more, if that is not enough.

        Args:
            key: that asks for room.
            new: bytes of each static buffer.
            peak: bytes that the pass needs.
        """
        while self._static_need(new) + self._scratch_need(peak) > self.budget.free - self._spare:
            victim = self.admission.victim(self.exact, key)
            if victim is None:
                return False
            self.drop_exact(victim)
            self.stats.dropped["evicted"] += 1
        return True

    def _static_need(self, new: Sequence[int]) -> int:
        """What the device gives for static buffers of these bytes, beside those that are there."""
        if not self.backend.pools_static:
            return sum(new)
        live = [size for graph in self._graphs() for size in graph.own]
        found = segment_bytes([*live, *self.arena.sizes, *new])
        return max(0, found - self.backend.reserved_static)

    def _scratch_need(self, peak: int, room: int = 0) -> int:
        """What the pool grows by for a pass that needs `peak` bytes, and `room` beside it.

        What a larger graph has left in the pool, its output included, serves a smaller one. What
        was estimated for graphs that are there is there, even if they took less.
        """
        found = scratch_bytes(self._margin * max(peak, self._peak) + room)
        return max(0, found - max(self.budget.of("pool"), self._covered))

    def _charge(self, *more: ExactGraph | BucketGraph) -> None:
        """Account for what is there, with graphs that are not kept yet."""
        self.budget.set("overhead", self.backend.overhead)
        if self.backend.pools_static:
            self.budget.set("static", self.backend.reserved_static)
            return
        own = sum(graph.own_bytes for graph in (*self._graphs(), *more))
        self.budget.set("static", own + self.arena.bytes)

    def _graphs(self) -> Iterator[ExactGraph | BucketGraph]:
        yield from self.exact.values()
        yield from self.buckets.values()

    def _judge(
        self,
        step: Step,
        inputs: Inputs,
        items: Sequence[Item],
        eager: Measured,
        gain: bool,
    ) -> str | None:
        """Replay once; compare with the eager pass in content and in time."""
        run = self.replay_exact if step.bucket is None else self.replay_bucket
        found = run(step, inputs, items)
        if found is None:
            return "mismatch"
        if self.verify and (wrong := disagreement(found, eager.outputs)):
            cause = f"{step.key or step.bucket}: {wrong}"
            self.stats.fail(cause)
            logger.warning("vision graph %s; it is not used", cause)
            return "mismatch"
        exact = step.bucket is None
        if exact and self.tower.fused and not same_bits(found, eager.outputs):
            cause = f"{step.key}: not bit for bit what the model gives"
            self.tower.unfuse(cause)
            self.stats.fail(cause)
            logger.warning("vision graph %s: graphs to come have nothing fused", cause)
            return "bits"
        if self.timing and gain:
            if step.bucket is not None:
                self.metadata.clear()  # Measured as for a new layout.
            _, ours = self.backend.timed(lambda: run(step, inputs, items))
            if not self.pays(ours, eager, inputs, step.indices):
                return "no_gain"
        return None
