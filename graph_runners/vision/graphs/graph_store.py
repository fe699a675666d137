"""The captured graphs of one tower."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_graft.base.log import logger
from vllm_graft.graph_runners.vision.capture.admission import Admission
from vllm_graft.graph_runners.vision.capture.graph_backend import CaptureStream, GraphBackend
from vllm_graft.graph_runners.vision.graphs.embedding_check import disagreement, same_bits
from vllm_graft.graph_runners.vision.graphs.graph import ExactGraph, PaddedGraph, TowerGraph
from vllm_graft.graph_runners.vision.graphs.graph_memory import (
    GraphMemory,
    MemoryNeed,
    measure_need,
)
from vllm_graft.graph_runners.vision.graphs.padding_metadata import MetadataCache
from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    EagerPass,
    ExactReplay,
    LayoutKey,
    Outputs,
    PaddedReplay,
    Replay,
    VisionBatch,
)
from vllm_graft.graph_runners.vision.graphs.vision_metrics import Reason, VitStats
from vllm_graft.graph_runners.vision.towers.tower import Buffers, Item, Pieces, Tower

MIN_GAIN = 0.97
"""A graph is kept if its replay takes at most this fraction of the eager pass's time."""

_SIDE_STREAM = 0.15
"""The fraction of the budget that a second stream's workspace may take."""

_SAMPLE_ROWS = 1024
"""Patches of the pass that tells how much memory buckets need."""


@dataclass
class StoreRules:
    """What a store demands of its graphs.

    Attributes:
        verify: compare the first replay of each graph with the eager pass.
        timing: drop a graph that is not faster than the eager pass. False where several ranks
            share the tower, as their clocks may disagree.
        lockstep: every rank that shares the tower has to hold the same graphs.
        roomy: the largest bucket leaves much of the budget to other graphs.
    """

    verify: bool
    timing: bool
    lockstep: bool = False
    roomy: bool = True


class GraphStore:
    """Captures, verifies, measures, replays and evicts the graphs of one tower. All graphs share
    one pool and one set of buffers for data, in `limit` bytes. `buckets` are the padded graphs, by
    their number of patches."""

    def __init__(
        self, tower: Tower, backend: GraphBackend, limit: int, admission: Admission[LayoutKey],
        stats: VitStats, rules: StoreRules,
    ) -> None:  # fmt: skip
        self.tower, self.backend, self.admission, self.stats = tower, backend, admission, stats
        self.rules = rules
        self.memory = GraphMemory(backend, limit, rules.roomy)
        self.budget, self.arena = self.memory.budget, self.memory.arena
        self.exact: dict[LayoutKey, ExactGraph] = {}
        self.buckets: dict[int, PaddedGraph] = {}
        self.metadata = MetadataCache(backend, limit)
        self._needs: dict[int, MemoryNeed | None] = {}

    def open(self, pool: Any) -> None:
        """Begin without graphs, in a pool by torch's handle; None makes one."""
        self.memory.open(pool)
        self.metadata.open()
        self._charge()

    def clear(self) -> None:
        """Drop all graphs and their memory; counts and refusals are kept."""
        for graph in self._graphs():
            graph.drop()
        self.exact.clear()
        self.buckets.clear()
        self.metadata.clear()
        self.memory.close()

    def restart(self) -> None:
        """Begin anew in another pool; the memory of the present one goes back to the device."""
        self.clear()
        self.open(None)

    def side_stream(self) -> CaptureStream | None:
        """A second stream for captured work; None if it would take too much of the budget. There is
        none where ranks share a tower: work on both streams would sum over the ranks, and two sums
        at a time may run in another order on another rank."""
        if self.rules.lockstep:
            return None
        found = self.backend.side_stream(int(_SIDE_STREAM * self.budget.limit))
        self._charge()
        return found

    # Replays

    def run(self, replays: Sequence[Replay], batch: VisionBatch) -> Outputs | None:
        """The embeddings of all items, in their order; None if a graph does not take its items."""
        outputs: list[Any] = [None] * len(batch.items)
        for replay in replays:
            parts = self.replay(replay, batch)
            if parts is None:
                return None
            for index, part in zip(replay.indices, parts, strict=True):
                outputs[index] = part
        return outputs

    def replay(self, replay: Replay, batch: VisionBatch) -> Outputs | None:
        """The embeddings of the replay's items, in the order of its indices. None if the graph does
        not take the items: an exact graph takes only data like those of its capture, and a padded
        graph only what fits into its bucket."""
        pieces = self.tower.data(batch.inputs, replay.indices)
        if isinstance(replay, ExactReplay):
            graph: TowerGraph = self.exact[replay.key]
            loaded = self.exact[replay.key].load(pieces)
        else:
            graph = self.buckets[replay.bucket]
            constants = self._metadata(graph, batch.pick(replay.indices))
            loaded = constants is not None and graph.load(constants, replay.rows, pieces)
        if not loaded:
            return None
        parts = self.tower.split(graph.replay(), batch.inputs, replay.indices, batch.items)
        return _clones(parts)

    def _metadata(self, graph: PaddedGraph, items: Sequence[Item]) -> Buffers | None:
        key = (graph.rows, *(item.layout for item in items))
        found = self.metadata.get(key)
        if found is None:
            found = graph.metadata(items)
            if found is not None:
                self.metadata.keep(key, found)
        return found

    # Eager passes

    def measure(self, batch: VisionBatch, indices: Sequence[int]) -> EagerPass:
        (outputs, peak), seconds = self.backend.timed(
            lambda: self.backend.peak(lambda: self.tower.eager(batch.inputs, indices))
        )
        return EagerPass(batch, indices, outputs, seconds, peak)

    def pays(self, seconds: float, eager: EagerPass) -> bool:
        """Whether `seconds` is enough less than what the eager pass takes."""
        eager_seconds = eager.seconds
        if seconds > 0.5 * eager_seconds:
            # It is close, and the measured eager pass may have been the first of its shapes.
            eager_seconds = min(eager_seconds, self.measure(eager.batch, eager.indices).seconds)
        return seconds <= MIN_GAIN * eager_seconds

    # Captures

    def capture_bucket(self, rows: int, segments: int, gain: bool) -> Reason | None:
        """Capture the padded graph of a bucket of `rows` patches, with noise for inputs. It holds
        at least so many attention segments. With `gain`, it has to be faster than the eager pass.
        Returns why the graph was not kept; None if it was."""
        inputs = self.tower.sample(rows)
        if inputs is None:
            return "no_sample"
        if self.buckets and not self.memory.holds_smaller_bucket:
            return "memory"
        batch = VisionBatch.read(self.tower, inputs)
        replay = PaddedReplay(tuple(batch.indices), batch.rows, rows)
        if gain:
            self.tower.eager(inputs, replay.indices)  # Loads kernels, which must not be timed.
        eager = self.measure(batch, replay.indices)
        pieces = self.tower.data(inputs, replay.indices)
        constants = PaddedGraph.filled(self.tower, rows, batch.items[0])
        with self.backend.static():
            graph = PaddedGraph(self.tower, self.arena, rows, pieces, constants, segments)
        self.tower.forward(graph.buffers)
        if not self._capture(graph, eager.peak, 0 if self.buckets else self.memory.least_room):
            return "memory"
        self.buckets[rows] = graph
        why = self._judge(replay, eager, gain)
        if why:
            self.drop_bucket(rows)
        return why

    def capture_exact(
        self, replay: ExactReplay, batch: VisionBatch, eager: EagerPass | None = None
    ) -> Reason | None:
        """Capture an exact graph with a replay's items of a batch; why it was not kept, if it was
        not. `eager` is the eager pass over these items, if there was one."""
        if eager is None:
            eager = self.measure(batch, replay.indices)
        constants = self.tower.constants(batch.pick(replay.indices))
        pieces = self.tower.data(batch.inputs, replay.indices)
        static = [value.nbytes for value in constants.values()] + self._missing(pieces)
        if not self._make_room(replay.key, MemoryNeed(replay.rows, static, eager.peak)):
            return "no_room"
        with self.backend.static():
            graph = ExactGraph(self.tower, self.arena, pieces, constants)
        if not self._capture(graph, eager.peak):
            return "memory"
        self.exact[replay.key] = graph
        why = self._judge(replay, eager, True)
        if why:
            self.drop_exact(replay.key)
        return why

    def drop_exact(self, key: LayoutKey) -> None:
        self.exact.pop(key).drop()
        self._charge()

    def drop_bucket(self, rows: int) -> None:
        self.buckets.pop(rows).drop()
        self._charge()

    def _missing(self, pieces: Pieces) -> list[int]:
        return [
            self.arena.missing(name, sum(len(tensor) for tensor in tensors), tensors[0])
            for name, tensors in pieces.items()
            if tensors[0].ndim
        ]

    def _capture(self, graph: ExactGraph | PaddedGraph, peak: int, leave: int = 0) -> bool:
        """Capture a graph; if less than `leave` bytes are left, drop it and restart the store."""
        self._charge(graph)
        before = self.backend.reserved()
        try:
            graph.capture(self.backend)
        except BaseException:
            self.memory.spoil_pool(self.backend.reserved() - before)
            graph.drop()
            self._charge()
            raise
        if self.memory.add_capture(self.backend.reserved() - before, peak, leave):
            return True
        graph.drop()
        self._overflow()
        return False

    def _overflow(self) -> None:
        # A pool does not shrink, so it goes with all its graphs.
        self.memory.margin *= 1.25
        lost = len(self.exact) + len(self.buckets)
        if lost and self.rules.lockstep:
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
        """Whether a bucket of so many patches leaves room for other graphs. It is an estimate from
        eager passes on noise over fewer patches, which run once."""
        sample = min(rows, _SAMPLE_ROWS)
        if sample not in self._needs:
            self._needs[sample] = measure_need(self.tower, self.backend, sample)
        need = self._needs[sample]
        return need is not None and self.memory.fits_bucket(need.scaled(rows), self._own_sizes())

    def _make_room(self, key: LayoutKey, need: MemoryNeed) -> bool:
        """Evict graphs of layouts that are counted less than `key`, until there is room for it."""
        while not self.memory.fits_exact(need, self._own_sizes()):
            victim = self.admission.victim(self.exact, key)
            if victim is None:
                return False
            self.drop_exact(victim)
            self.stats.dropped["evicted"] += 1
        return True

    def _charge(self, *more: ExactGraph | PaddedGraph) -> None:
        self.memory.charge(self._own_sizes(*more))

    def _own_sizes(self, *more: ExactGraph | PaddedGraph) -> list[int]:
        return [size for graph in (*self._graphs(), *more) for size in graph.own]

    def _graphs(self) -> Iterator[ExactGraph | PaddedGraph]:
        yield from self.exact.values()
        yield from self.buckets.values()

    # Checks of what was captured

    def _judge(self, replay: Replay, eager: EagerPass, gain: bool) -> Reason | None:
        found = self.replay(replay, eager.batch)
        why = self._compare(replay, found, eager.outputs)
        if why is not None or not (self.rules.timing and gain):
            return why
        if isinstance(replay, PaddedReplay):
            self.metadata.clear()  # The time has to be that of a new layout.
        _, seconds = self.backend.timed(lambda: self.replay(replay, eager.batch))
        return None if self.pays(seconds, eager) else "no_gain"

    def _compare(self, replay: Replay, found: Outputs | None, expected: Outputs) -> Reason | None:
        if found is None:
            return "mismatch"
        if self.rules.verify and (wrong := disagreement(found, expected)):
            self.stats.fail(f"{replay}: {wrong}", "vision graph %s; it is not used")
            return "mismatch"
        exact = isinstance(replay, ExactReplay)
        if exact and self.tower.fused and not same_bits(found, expected):
            cause = f"{replay}: not bit for bit what the model gives"
            self.tower.unfuse(cause)
            self.stats.fail(cause, "vision graph %s: graphs to come have nothing fused")
            return "bits"
        return None


def _clones(parts: Outputs) -> Outputs:
    # The next replay of any graph writes to the static output.
    return [part.clone() for part in parts]
