"""Passes with fused blocks: whether a tower has them, and whether they pay without a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import logger
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.vision.bucket_plan import DEFAULT_MAX_PATCHES, MOST_PATCHES
from vllm_graft.graph_runners.vision.graphs.embedding_check import same_bits
from vllm_graft.graph_runners.vision.graphs.graph_store import GraphStore
from vllm_graft.graph_runners.vision.graphs.vision_batch import VisionBatch
from vllm_graft.graph_runners.vision.vision_config import VitConfig


def fuse_tower(store: GraphStore, options: VitConfig, agree: Callable[[bool], bool]) -> None:
    """Let the tower find out which of its operators it can fuse.

    Args:
        store: the graphs of the tower.
        options: `fuse` is read.
        agree: tells whether all ranks that share the tower say yes.

    Raises:
        ConfigError: if the user asks for fusing, and nothing can be fused.
    """
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
    """Whether the model's pass over batches larger than any graph is faster with fused blocks.

    Compares passes over noise, at a size just above the largest graph and at a large one. Their
    bits have to be the same, too. The answer is False where ranks would have to agree, and where a
    pass fails, for instance for too little memory. Waits for the device.

    Args:
        store: the graphs of the tower.
        max_rows: patches of the largest graph.
    """
    if not (store.rules.timing and store.tower.fused):
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
    batch = VisionBatch.read(tower, inputs)
    run = functools.partial(tower.eager_fused, inputs, batch.indices)
    tower.eager(inputs, batch.indices)  # Loads kernels, which must not be timed.
    eager = store.measure(batch, batch.indices)
    found = run()
    if found is None or not same_bits(found, eager.outputs):
        logger.warning("vision passes are not fused: other bits than the model's at %d rows", rows)
        return False
    return store.pays(store.backend.timed(run)[1], eager)
