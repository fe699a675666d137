"""Which graphs are captured when the engine starts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tp_group

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.vision.graphs.embedding_check import same_bits
from vllm_graft.graph_runners.vision.capture.allocator import scratch_bytes
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.replay_plan import bucket_sizes
from vllm_graft.graph_runners.vision.towers.protocol import obstacles
from vllm_graft.graph_runners.vision.towers.tower import Tower
from vllm_graft.graph_runners.vision.vision_config import VitConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

DEFAULT_MAX_PATCHES = 4096
"""Where it is not measured what pays."""

MOST_PATCHES = 8192
"""Where it is: the largest that fits the budget and is faster than the eager pass is kept."""

SMALLEST_BUCKET = 128

_WIDEST_STEP, _MOST_STEPS = 128, 32
"""Rows between two buckets: products of matrices are cut into tiles of 128 rows, so a bucket in
between would be no faster; and how many steps there are at most where all are as wide."""

_WIDE_STEP = 256
"""Rows between two buckets above `DEFAULT_MAX_PATCHES`."""


def plan_buckets(
    tower: Tower, options: VitConfig, budgets: Sequence[int], measured: bool = True
) -> list[int]:
    """Rows of the buckets, ascending: ours, or vLLM's budgets, or steps of 1.25, 128 and 256.

    Args:
        tower: has no buckets if its `unit` is 0.
        options: `buckets` and `max_patches` are read.
        budgets: vLLM's ``encoder_cudagraph_token_budgets``, in embeddings.
        measured: whether a bucket that does not pay is dropped.
    """
    unit = tower.unit
    if not unit:
        return []
    if options.buckets is not None:
        chosen = [-(-rows // unit) * unit for rows in options.buckets]
    elif budgets:
        chosen = [tokens * unit for tokens in budgets]
    else:
        largest = options.max_patches or DEFAULT_MAX_PATCHES
        widest = max(_WIDEST_STEP, largest / _MOST_STEPS)
        step = math.lcm(unit, 64)
        sizes = bucket_sizes(SMALLEST_BUCKET, largest, step, widest=widest)
        if options.max_patches or not measured:
            return sizes
        wide = range(largest + _WIDE_STEP, MOST_PATCHES + 1, _WIDE_STEP)
        return sorted({*sizes, *(rows // step * step for rows in wide)})
    most = options.max_patches or max(chosen, default=0)
    return sorted({rows for rows in chosen if 0 < rows <= most})


def capture_buckets(
    store: GraphStore,
    planned: Sequence[int],
    segments: int,
    pays: bool,
    agree: Callable[[bool], bool],
) -> list[int]:
    """Capture the largest bucket that fits the budget and pays, and all smaller ones.

    The largest first: smaller ones then find their memory in the pool. Where one was captured for
    nothing, its memory is given back.

    Args:
        store: gets the buckets.
        planned: rows of each.
        segments: attention segments that each has room for at least.
        pays: whether a bucket has to be faster than the eager pass.
        agree: whether it is so on all ranks that share the tower.

    Returns:
        rows of the buckets that were kept, ascending.
    """
    most = math.inf
    for rows in sorted(planned, reverse=True):
        first = not store.buckets
        if first and rows > most:
            continue
        if first and not agree(store.fits(rows)):
            store.stats.dropped["memory"] += 1
            continue
        # Once one pays, all smaller ones do.
        why = _capture(store, rows, segments, pays and first)
        if not agree(why is None) and why is None:
            store.drop_bucket(rows)
            why = "other_rank"
        if why is None:
            store.stats.captures["bucket"] += 1
        else:
            store.stats.dropped[why] += 1
            if why == "no_gain":  # Never with other ranks, which would have to follow.
                store.restart()
                smaller = [size for size in planned if size < rows]
                most = _largest_that_pays(store, smaller, segments)
    return sorted(store.buckets)


def _capture(store: GraphStore, rows: int, segments: int, gain: bool) -> str | None:
    try:
        return store.capture_bucket(rows, segments, gain)
    except Exception as error:
        cause = f"bucket of {rows}: {type(error).__name__}: {error}"
        store.stats.fail(cause)
        logger.warning("vision graph was not captured: %s", cause)
        return "error"


def _largest_that_pays(store: GraphStore, smaller: Sequence[int], segments: int) -> int:
    """Of the large buckets, by halves: each attempt takes an eager pass, a capture and a replay.

    Returns:
        its rows; where none of them pays, those of the largest bucket that is not large.
    """
    large = sorted(rows for rows in smaller if rows > DEFAULT_MAX_PATCHES)
    low, high = 0, len(large)
    while low < high:
        middle = (low + high) // 2
        why = _capture(store, large[middle], segments, True)
        if why == "error":  # Its pool is better left alone.
            break
        store.restart()
        low, high = (low, middle) if why else (middle + 1, high)
        if why:
            store.stats.dropped[why] += 1
    return large[low - 1] if low else DEFAULT_MAX_PATCHES


def prepare(store: GraphStore, options: VitConfig, agree: Callable[[bool], bool]) -> None:
    """Have the tower find out what it can fuse.

    Raises:
        ConfigError: if something was to be fused, and nothing can be.
    """
    tower = store.tower
    if options.fuse is False:
        tower.unfuse("not asked for")
        return
    tower.fuse(store.beside, agree)
    if options.fuse and not tower.fused:
        raise ConfigError(
            f"{flag('vit', 'fuse')}=true, but nothing of this tower is fused "
            f"(no: {tower.why_not_fused}): drop the flag, and what can be fused with the same bits "
            "is, and the rest is left as it is."
        )


def fused_passes_pay(store: GraphStore, max_rows: int) -> bool:
    """Whether the model's pass over batches larger than any graph is faster with fused blocks.

    Runs both on noise, over just more rows than a graph has and over many. Their bits have to be
    the same there, too. Waits for the device. Not where ranks would have to agree. A failure, such
    as too little memory, is one of these passes alone.

    Args:
        store: without graphs or with them.
        max_rows: of the largest graph.
    """
    if not (store.timing and store.tower.fused):
        return False
    more = max_rows + max_rows // 4
    many = max(DEFAULT_MAX_PATCHES, min(2 * max_rows, MOST_PATCHES))
    try:
        return all(_fused_pass_pays(store, rows) for rows in sorted({more, max(more, many)}))
    except Exception as error:
        cause = f"passes with fused blocks: {type(error).__name__}: {error}"
        store.stats.fail(cause)
        logger.warning("vision encoder: %s; the engine's own are taken", cause)
        return False


def _fused_pass_pays(store: GraphStore, rows: int) -> bool:
    tower = store.tower
    inputs = tower.sample(rows)
    if inputs is None:
        return False
    indices = range(len(tower.items(inputs)))
    run = functools.partial(tower.eager_fused, inputs, indices)
    tower.eager(inputs, indices)  # Loads kernels, which is not timed.
    eager = store.measure(inputs, indices)
    found = run()
    if found is None or not same_bits(found, eager.outputs):
        logger.warning("vision passes are not fused: other bits than the model's at %d rows", rows)
        return False
    return store.pays(store.backend.timed(run)[1], eager, inputs, indices)


def check_room(store: GraphStore, memory: int) -> None:
    """Refuse a budget of `memory` MiB that holds no graph beside what captures take anyway.

    Raises:
        ConfigError: with the bytes that are taken.
    """
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
) -> str | None:
    """Why nothing is captured at all, in a word; None if something may be.

    Args:
        vllm_config: LoRA is read.
        model: the loaded model.
        tower: of the model.
        reads_device: of the back end.
        idle: whether ranks that capture at the start only know of nothing to capture.
    """
    lora = vllm_config.lora_config
    if lora is not None and lora.enable_tower_connector_lora:
        return "tower_lora"
    found = obstacles(model, tower, reads_device)
    if idle:
        found = found or "sharded_tower_without_buckets"
    if found:
        warning_once(f"no vision graph is captured: {found}")
    return found


def all_ranks_agree(ok: bool) -> bool:
    """Whether it is so on all ranks that share the tower: each then goes the same way."""
    group = get_tp_group()
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, ok, group=group.cpu_group)
    return all(answers)
