"""Captures of graphs: those of the start, and exact ones while the engine serves."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import VllmConfig

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.vision import replay_plan
from vllm_graft.graph_runners.vision.bucket_plan import DEFAULT_MAX_PATCHES, MOST_PATCHES
from vllm_graft.graph_runners.vision.capture.admission import Admission, TimeShare
from vllm_graft.graph_runners.vision.capture.device_memory import scratch_bytes
from vllm_graft.graph_runners.vision.graphs.embedding_check import same_bits
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.graphs.vision_batch import (
    EagerPass,
    ExactReplay,
    LayoutKey,
    VisionBatch,
)
from vllm_graft.graph_runners.vision.graphs.vision_metrics import Reason, VitStats
from vllm_graft.graph_runners.vision.towers.protocol import obstacles
from vllm_graft.graph_runners.vision.towers.tower import Tower
from vllm_graft.graph_runners.vision.vision_config import VitConfig

_PASSING: tuple[Reason, ...] = ("no_room", "memory", "bits")
"""Refusals for now: other graphs may go and leave room, and the next capture fuses nothing."""


class ExactCaptures:
    """Captures exact graphs; a failure costs its layout the graph, but no batch its answer."""

    def __init__(
        self, store: GraphStore, admission: Admission[LayoutKey], rate: TimeShare, stats: VitStats
    ) -> None:
        self._store, self._admission, self._rate, self._stats = store, admission, rate, stats

    def capture_due(
        self, group: ExactReplay | None, batch: VisionBatch, eager: EagerPass | None = None
    ) -> None:
        """Capture a group, if any, while the engine serves: the time counts against the rate."""
        if group is None:
            return
        start = time.perf_counter()
        self.capture(group, batch, eager)
        seconds = time.perf_counter() - start
        self._rate.spent(seconds)
        self._stats.capture_seconds += seconds

    def capture(
        self, group: ExactReplay, batch: VisionBatch, eager: EagerPass | None = None
    ) -> None:
        """Capture the graph of a group; a failure is counted, and its key is refused. `eager` is
        the eager pass over the items of the group, if there was one."""
        try:
            why = self._store.capture_exact(group, batch, eager)
        except Exception as error:
            why = "error"
            cause = f"{group.key}: {type(error).__name__}: {error}"
            self._stats.fail(cause, "vision graph was not captured: %s")
        if why is None:
            self._stats.captures["exact"] += 1
            return
        self._stats.dropped[why] += 1
        self._admission.refuse(group.key, why, for_now=why in _PASSING)


class StartupCaptures:
    """Captures buckets, and the exact graphs of layouts that the tower knows beforehand.

    vLLM captures twice: first to profile memory, then to keep the graphs. What the first time drops
    is not tried again the second time.

    Args:
        bucket_rows: patches of the buckets to capture.
        segments: attention segments that each bucket has to hold at least.
        agree: tells whether all ranks that share the tower say yes.

    Attributes:
        max_rows: patches of the largest graph.
        fused_pays: whether passes with fused blocks were measured to be faster than eager ones.
    """

    def __init__(
        self, store: GraphStore, exact: ExactCaptures, options: VitConfig,
        bucket_rows: Sequence[int], segments: int, agree: Callable[[bool], bool],
    ) -> None:  # fmt: skip
        self.agree = agree
        self.fused_pays = False
        self._store, self._exact, self._options = store, exact, options
        self._bucket_rows, self._segments = list(bucket_rows), segments
        self._prepared = False
        largest = max(bucket_rows, default=DEFAULT_MAX_PATCHES)
        self.max_rows: int = largest if options.max_patches is None else options.max_patches

    @property
    def number(self) -> int:
        return len(self._bucket_rows) + len(self._store.tower.startup())

    def capture(self) -> None:
        first, self._prepared = not self._prepared, True
        if first:
            fuse_tower(self._store, self._options, self.agree)
        pays = self._options.max_patches is None
        kept = capture_buckets(self._store, self._bucket_rows, self._segments, pays, self.agree)
        self._bucket_rows = kept
        if pays and kept:
            self.max_rows = max(kept)
        if first:
            self.fused_pays = fused_passes_pay(self._store, self.max_rows)
        for inputs in self._store.tower.startup():
            self._capture_layouts(VisionBatch.read(self._store.tower, inputs))

    def _capture_layouts(self, batch: VisionBatch) -> None:
        for group in replay_plan.groups(batch.items, self.max_rows):
            if group.key in self._store.exact:
                continue
            self._exact.capture(group, batch)
            kept = group.key in self._store.exact
            if not self.agree(kept) and kept:
                self._store.drop_exact(group.key)


def capture_buckets(
    store: GraphStore,
    planned: Sequence[int],
    segments: int,
    pays: bool,
    agree: Callable[[bool], bool],
) -> list[int]:
    """Capture the largest bucket that fits into the budget and pays, and all smaller ones. The
    largest bucket comes first, as smaller ones then find their memory in the pool. If a bucket was
    captured only to be measured, its memory is given back. With `pays`, a bucket has to be faster
    than the eager pass. Returns the patches of the buckets that were kept, ascending."""
    most = math.inf
    for rows in sorted(planned, reverse=True):
        first = not store.buckets
        if first and rows > most:
            continue
        if first and not agree(store.fits(rows)):
            store.stats.dropped["memory"] += 1
            continue
        # If one bucket pays, all smaller ones do.
        why = _capture_bucket(store, rows, segments, pays and first)
        if not agree(why is None) and why is None:
            store.drop_bucket(rows)
            why = "other_rank"
        if why is None:
            store.stats.captures["bucket"] += 1
        else:
            store.stats.dropped[why] += 1
            if why == "no_gain":  # Happens only without other ranks, which would have to follow.
                store.restart()
                smaller = [size for size in planned if size < rows]
                most = _largest_that_pays(store, smaller, segments)
    return sorted(store.buckets)


def _capture_bucket(store: GraphStore, rows: int, segments: int, gain: bool) -> Reason | None:
    try:
        return store.capture_bucket(rows, segments, gain)
    except Exception as error:
        cause = f"bucket of {rows}: {type(error).__name__}: {error}"
        store.stats.fail(cause, "vision graph was not captured: %s")
        return "error"


def _largest_that_pays(store: GraphStore, smaller: Sequence[int], segments: int) -> int:
    """Search by halves among the large buckets: each attempt is an eager pass and a capture. If no
    large bucket pays, it is `DEFAULT_MAX_PATCHES`."""
    large = sorted(rows for rows in smaller if rows > DEFAULT_MAX_PATCHES)
    low, high = 0, len(large)
    while low < high:
        middle = (low + high) // 2
        why = _capture_bucket(store, large[middle], segments, True)
        if why == "error":  # Its pool is better left alone.
            break
        store.restart()
        low, high = (low, middle) if why else (middle + 1, high)
        if why:
            store.stats.dropped[why] += 1
    return large[low - 1] if low else DEFAULT_MAX_PATCHES


def check_room(store: GraphStore, memory: int) -> None:
    """Refuse a budget of `memory` MiB that holds no graph beside what captures take anyway. Raises
    `ConfigError`, which says how many bytes are taken, and how many are needed."""
    overhead, free = store.backend.overhead, store.budget.free
    if overhead and free < scratch_bytes(0):
        store.clear()
        raise ConfigError(
            f"{flag('vit', 'memory')}={memory}: cuBLAS takes {overhead >> 20} MiB for a stream "
            f"that captures on this GPU, which leaves {free >> 20} MiB, too little for any graph: "
            f"give at least {(overhead >> 20) + 32}, or drop {flag('vit')}."
        )


def find_obstacle(
    vllm_config: VllmConfig, model: Any, tower: Tower, reads_device: bool, idle: bool
) -> Reason | None:
    """Why nothing is captured at all; None if something may be. It is `idle` if ranks share the
    tower, and there is nothing to capture at the start."""
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        return "tower_lora"
    found = obstacles(model, tower, reads_device)
    if idle:
        found = found or "sharded_tower_without_buckets"
    if found:
        warning_once(f"no vision graph is captured: {found}")
    return found


def fuse_tower(store: GraphStore, options: VitConfig, agree: Callable[[bool], bool]) -> None:
    """Let the tower find what it can fuse; a ConfigError if the user asks for it in vain."""
    tower = store.tower
    if options.fuse is False:
        tower.unfuse("not asked for")
        return
    tower.fuse(store.side_stream, agree)
    if options.fuse and not tower.fused:
        raise ConfigError(
            f"{flag('vit', 'fuse')}=true, but nothing of this tower is fused "
            f"(no: {tower.why_not_fused}): drop the flag, and what can be fused with the same bits "
            "is, and the rest is left as it is."
        )


def fused_passes_pay(store: GraphStore, max_rows: int) -> bool:
    """Whether the model's pass over more than `max_rows` patches is faster with fused blocks.
    Compares passes over noise, at a size just above the largest graph and at a large one. Their
    bits have to be the same, too. The answer is False where ranks would have to agree, and where a
    pass fails, for instance for too little memory. Waits for the device."""
    if not (store.rules.timing and store.tower.fused):
        return False
    more = max_rows + max_rows // 4
    many = max(DEFAULT_MAX_PATCHES, min(2 * max_rows, MOST_PATCHES))
    try:
        return all(_fused_pass_pays(store, rows) for rows in sorted({more, max(more, many)}))
    except Exception as error:
        cause = f"passes with fused blocks: {type(error).__name__}: {error}"
        store.stats.fail(cause, "vision encoder: %s; the engine's own are taken")
        return False


def _fused_pass_pays(store: GraphStore, rows: int) -> bool:
    tower = store.tower
    inputs = tower.sample(rows)
    if inputs is None:
        return False
    batch = VisionBatch.read(tower, inputs)
    run = functools.partial(tower.eager_fused, inputs, batch.indices)
    tower.eager(inputs, batch.indices)  # Loads kernels, which must not be timed.
    eager = store.measure(batch, batch.indices)
    found = run()
    if found is None or not same_bits(found, eager.outputs):
        logger.warning("vision passes are not fused: other bits than the model's at %d rows", rows)
        return False
    return store.pays(store.backend.timed(run)[1], eager)
