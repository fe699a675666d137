"""The captured graphs of one tower: captures within a budget, verifies, measures, evicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vllm_graft.graph_runners.core.arena import Arena
from vllm_graft.graph_runners.core.backend import GraphBackend
from vllm_graft.graph_runners.core.budget import ByteBudget
from vllm_graft.graph_runners.core.lru import TensorCache
from vllm_graft.graph_runners.core.policy import Admission
from vllm_graft.graph_runners.vit.graph import BucketGraph, ExactGraph
from vllm_graft.graph_runners.vit.plan import LayoutKey, Step
from vllm_graft.graph_runners.vit.stats import VitStats
from vllm_graft.graph_runners.vit.tower import Buffers, Inputs, Item, Tower
from vllm_graft.graph_runners.vit.verify import disagreement
from vllm_graft.log import logger

MIN_GAIN = 0.97
"""A graph is kept if it takes at most this share of the eager time."""

# torch's allocator takes memory from the device in segments: of 2 MiB for tensors up to 1 MiB, of
# 20 MiB for those up to 10 MiB. The slack is for a few of the small ones.
_SEGMENT_BYTES, _SLACK_BYTES = 20 << 20, 4 << 20
_BUCKET_SHARE = 0.9
_METADATA_SHARE = 0.125

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
    ) -> None:
        self.tower, self.backend, self.admission, self.stats = tower, backend, admission, stats
        self.verify, self.timing = verify, timing
        self.budget = ByteBudget(limit)
        self.arena = Arena(backend.device)
        self.exact: dict[LayoutKey, ExactGraph] = {}
        self.buckets: dict[int, BucketGraph] = {}
        self.metadata = TensorCache(int(_METADATA_SHARE * limit))
        self._peak = 0

    def open(self, pool: Any) -> None:
        """Begin with no graph; `pool` is torch's handle."""
        before = self.backend.reserved()
        self.backend.open(pool)
        self.budget.add("pool", self.backend.reserved() - before)

    def clear(self) -> None:
        """Drop all graphs and the memory; counts and refusals are kept."""
        for graph in (*self.exact.values(), *self.buckets.values()):
            graph.drop()
        self.exact.clear()
        self.buckets.clear()
        self.arena.clear()
        self.metadata.clear()
        self.budget.clear()
        self._peak = 0
        self.backend.close()

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
        """Of a padded batch; that of recent ones is kept, as computing it takes up to 1 ms."""
        key = (graph.rows, *(item.layout for item in items))
        found: Buffers | None = self.metadata.get(key)
        if found is None:
            found = graph.metadata(items)
            if found is not None:
                self.metadata.put(key, found, self.budget.free)
                self.budget.set("metadata", self.metadata.bytes)
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
        items = self.tower.items(inputs)
        indices = tuple(range(len(items)))
        step = Step(indices, sum(item.rows for item in items), bucket=rows)
        self.tower.eager(inputs, indices)  # Compiles and loads kernels.
        eager = self.measure(inputs, indices)
        pieces = self.tower.data(inputs, indices)
        graph: BucketGraph | None
        graph = BucketGraph(self.tower, self.arena, rows, pieces, items[0], segments)
        self.arena_outputs(self.tower.forward(graph.buffers))
        if not self._capture(graph, ("bucket", rows), eager.peak):
            if not self.buckets and not self.exact:
                # A pool does not shrink; without graphs it can be given back.
                graph = None
                self.clear()
                self.open(None)
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
        own = sum(value.nbytes for value in self.tower.constants(chosen).values())
        pieces = self.tower.data(inputs, step.indices)
        shared = sum(
            self.arena.missing(name, sum(len(t) for t in tensors), tensors[0])
            for name, tensors in pieces.items()
            if tensors[0].ndim
        )
        if not self._make_room(key, own + shared, eager.peak):
            return "no_room"
        graph = ExactGraph(self.tower, self.arena, pieces, chosen)
        if not self._capture(graph, key, eager.peak):
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

    def arena_outputs(self, output: Any) -> None:
        """Make room in the arena for outputs like this."""
        for place, leaf in enumerate(torch.utils._pytree.tree_leaves(output)):
            self.arena.rows(f"output/{place}", leaf.shape[0], leaf)
        self.budget.set("arena", self.arena.bytes)

    def drop_exact(self, key: LayoutKey) -> None:
        """Let one graph go."""
        self.exact.pop(key).drop()
        self.budget.drop(key)

    def drop_bucket(self, rows: int) -> None:
        """Let one bucket go."""
        self.buckets.pop(rows).drop()
        self.budget.drop(("bucket", rows))

    def fits(self, rows: int) -> bool:
        """Whether a bucket of so many rows leaves room for exact graphs, by a smaller one's need.

        Runs the eager pass on noise.
        """
        inputs = self.tower.sample(min(rows, 1024))
        if inputs is None:
            return False
        items = self.tower.items(inputs)
        indices = range(len(items))
        self.tower.eager(inputs, indices)
        output, peak = self.backend.peak(lambda: self.tower.eager(inputs, indices))
        static = sum(value.nbytes for value in self.tower.constants(items).values())
        static += sum(t.nbytes for ts in self.tower.data(inputs, indices).values() for t in ts)
        static += sum(value.nbytes for value in output)
        times = rows / sum(item.rows for item in items)
        need = static * times + _pool_bytes(1.1 * peak * times)
        return bool(need <= _BUCKET_SHARE * self.budget.free)

    def _capture(self, graph: ExactGraph | BucketGraph, owner: Any, peak: int) -> bool:
        self.budget.set("arena", self.arena.bytes)
        self.budget.set(owner, graph.own_bytes)
        before = self.backend.reserved()
        try:
            graph.capture(self.backend, self.arena)
        except BaseException:
            self.budget.drop(owner)
            raise
        finally:
            self.budget.add("pool", self.backend.reserved() - before)
        self._peak = max(self._peak, peak)
        if self.budget.free < 0:
            graph.drop()
            self.budget.drop(owner)
            return False
        return True

    def _make_room(self, key: LayoutKey, own_bytes: int, peak: int) -> bool:
        """Evict keys that are counted less; False, evicting nothing more, if that is not enough."""
        # What a larger graph has left in the pool serves a smaller one, but for a few segments.
        need = own_bytes + _SLACK_BYTES
        if peak > self._peak:
            need += _pool_bytes(1.1 * (peak - self._peak))
        if self.budget.free < need:
            self.metadata.clear()
            self.budget.drop("metadata")
        while self.budget.free < need:
            victim = self.admission.victim(self.exact, key)
            if victim is None:
                return False
            self.drop_exact(victim)
            self.stats.dropped["evicted"] += 1
        return True

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
        if self.timing and gain:
            self.metadata.clear()  # Measured as for a new layout.
            self.budget.drop("metadata")
            _, ours = self.backend.timed(lambda: run(step, inputs, items))
            theirs = eager.seconds
            if ours > 0.5 * theirs:
                # In doubt: the eager pass may have been the first of its shapes.
                theirs = min(theirs, self.measure(inputs, step.indices).seconds)
            if ours > MIN_GAIN * theirs:
                return "no_gain"
        return None


def _pool_bytes(need: float) -> int:
    """What the pool grows by for tensors of `need` bytes."""
    return math.ceil(need / _SEGMENT_BYTES) * _SEGMENT_BYTES + _SLACK_BYTES
