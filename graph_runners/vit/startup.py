"""Which graphs are captured when the engine starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_graft.config import VitConfig
from vllm_graft.graph_runners.vit.plan import bucket_sizes
from vllm_graft.graph_runners.vit.store import GraphStore
from vllm_graft.graph_runners.vit.tower import Tower
from vllm_graft.log import logger

DEFAULT_MAX_PATCHES = 4096
SMALLEST_BUCKET = 128

_WIDEST_STEP, _MOST_STEPS = 128, 32
"""Rows between two buckets: products of matrices are cut into tiles of 128 rows, so a bucket in
between would be no faster; and how many steps there are at most where all are as wide."""


def plan_buckets(tower: Tower, options: VitConfig, budgets: Sequence[int]) -> list[int]:
    """Rows of the buckets, ascending: ours, or vLLM's budgets, or steps of 1.25 and of 128.

    Args:
        tower: has no buckets if its `unit` is 0.
        options: `buckets` and `max_patches` are read.
        budgets: vLLM's ``encoder_cudagraph_token_budgets``, in embeddings.
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
        return bucket_sizes(SMALLEST_BUCKET, largest, math.lcm(unit, 64), widest=widest)
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

    The largest first: smaller ones then find their memory in the pool.

    Args:
        store: gets the buckets.
        planned: rows of each.
        segments: attention segments that each has room for at least.
        pays: whether a bucket has to be faster than the eager pass.
        agree: whether it is so on all ranks that share the tower.

    Returns:
        rows of the buckets that were kept, ascending.
    """
    for rows in sorted(planned, reverse=True):
        first = not store.buckets
        if first and not agree(store.fits(rows)):
            store.stats.dropped["memory"] += 1
            continue
        # Once one pays, all smaller ones do.
        try:
            why = store.capture_bucket(rows, segments, pays and first)
        except Exception as error:
            why = "error"
            cause = f"bucket of {rows}: {type(error).__name__}: {error}"
            store.stats.fail(cause)
            logger.warning("vision graph was not captured: %s", cause)
        if not agree(why is None) and why is None:
            store.drop_bucket(rows)
            why = "other_rank"
        if why is None:
            store.stats.captures["bucket"] += 1
        else:
            store.stats.dropped[why] += 1
    return sorted(store.buckets)


def all_ranks_agree(ok: bool) -> bool:
    """Whether it is so on all ranks that share the tower: each then goes the same way."""
    group = get_tp_group()
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, ok, group=group.cpu_group)
    return all(answers)
