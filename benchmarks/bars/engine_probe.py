"""Measurements of `benchmarks.bars` within an engine: host time per step, and replays of graphs.

Functions for `LLM.collective_rpc`; they get vLLM's worker. Device times are medians by CUDA events.
They are of graphs that the engine captured for serving, replayed while it serves no request.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks.bars import kernel_times as kernels
from benchmarks.bars.host_clock import PARTS, WARM_UP, Watch
from benchmarks.node_counts import calling_core
from benchmarks.step_bytes import (
    PASSES,
    copy_bandwidth,
    draft_bytes,
    median_seconds,
    replay_seconds,
)

NODES, ROWS, CONTEXT = 63, 32, 2000
"""Nodes of bar 3's tree, rows of bar 4's wider pass, and tokens of their request."""

MOST_KERNELS = 25

_watching: list[tuple[contextlib.ExitStack, list[dict[str, float]]]] = []


def watch_host(worker: Any, batch: int) -> None:
    """Begin to time the steps of `batch` decodes: two clock readings around five methods."""
    stack = contextlib.ExitStack()
    try:
        steps = stack.enter_context(Watch().watching(calling_core(), batch))
    except AttributeError as error:
        # The windows are valid without it.
        print(f"the host's time is not taken: {error}", flush=True)
        steps = []
    _watching.append((stack, steps))


def host_times(worker: Any) -> dict[str, float]:
    """Stop timing; return median microseconds of each part of a step, and the steps counted.

    `host` is schedule, execute and sample: from the schedule to the last launch, the draft's.
    `with_update` has what the scheduler does with the result as well. Only `steps` is returned
    where there are fewer than two. Steps with prompts or with fewer requests are not counted.
    """
    stack, steps = _watching.pop()
    stack.close()
    counted = steps[WARM_UP:]
    found: dict[str, float] = {"steps": len(counted)}
    if len(counted) < 2:
        return found
    sums = {part: (part,) for part in PARTS} | {
        "host": ("schedule", "execute", "sample"),
        "with_update": ("schedule", "execute", "sample", "update"),
    }
    for name, parts in sums.items():
        of_steps = [sum(step[part] for part in parts) for step in counted]
        found[name] = round(statistics.median(of_steps) * 1e6, 1)
    return found


def device_bars(worker: Any, with_kernels: bool = False) -> dict[str, dict[str, Any]]:
    """Measure bars 3 and 4 on this worker's device; a bar that can't be measured says why.

    `with_kernels` adds the lines of `benchmarks.bars.kernel_times` for one replay of each.
    """
    found: dict[str, dict[str, Any]] = {}
    for bar, measure in (("3", draft_levels), ("4", target_rows)):
        if worker.model_runner.device.type != "cuda":
            found[bar] = {"skipped": "no CUDA device, and so no events to time graphs by"}
            continue
        # A fault here must not end the engine, nor cost what has been measured already.
        try:
            found[bar] = measure(worker, with_kernels=with_kernels)
        except Exception:
            found[bar] = {"skipped": traceback.format_exc()}
    return found


def draft_levels(
    worker: Any, nodes: int = NODES, context: int = CONTEXT, with_kernels: bool = False
) -> dict[str, Any]:
    """Measure bar 3: a step's passes of the draft over levels, beside reading their weights.

    It times one replay of the levels' graph for one request. With topk 8, 7 steps and 63 nodes the
    graph has six passes, the output head and the choice of tokens for each, and the choice of
    nodes. The request has `context` keys and sits in slot 0, so that the graph does the same work
    as for a live request. It is timed greedily and with a temperature (noise per token); the slower
    counts.

    Raises:
        LookupError: no graph of such a tree was captured.
    """
    import torch

    from vllm_graft.spec_decode.drafters.step_costs import draft_launches

    runner = worker.model_runner
    draft = runner.speculator
    launches = draft_launches(draft, nodes, 1) if nodes in draft.trees.plans else None
    if launches is None:
        raise LookupError(f"no graph of a tree of {nodes} nodes for one request")
    plan, levels = (draft.trees.narrow_plans or draft.trees.plans)[nodes], launches[-1]
    seconds = {}
    with torch.inference_mode():
        pretend_request(runner, 1, context)
        plan.growth.map_block_tables(draft)
        draft.idx_mapping[0], plan.growth.prefix_lens[0] = 0, context
        draft.input_buffers.positions[0] = context
        for temperature in (0.0, 1.0):
            draft.temperature[0] = temperature
            seconds[temperature] = median_seconds(levels, runner.device)
        shown = _kernels(levels) if with_kernels else []
        # Index -1 is padding, which belongs to no request.
        draft.idx_mapping[0], plan.growth.prefix_lens[0] = -1, 0
    passes = min(plan.shape.steps, nodes) - 1
    needed, bandwidth = draft_bytes(draft.model, draft.head.fp8), copy_bandwidth(runner.device)
    floor = passes * needed / bandwidth
    return {
        "topk": plan.shape.topk,
        "steps": plan.shape.steps,
        "nodes": nodes,
        "passes": passes,
        "greedy_ms": seconds[0.0] * 1e3,
        "sampled_ms": seconds[1.0] * 1e3,
        "bytes_a_pass": needed,
        "copy_gb_per_s": bandwidth / 1e9,
        "floor_ms": floor * 1e3,
        "ratio": max(seconds.values()) / floor,
        "kernels": shown,
    }


def target_rows(
    worker: Any, rows: int = ROWS, context: int = CONTEXT, with_kernels: bool = False
) -> dict[str, Any]:
    """Measure bar 4: the target over `rows` rows of a request, beside a pass over one row.

    It times replays of the FULL graphs that serve these two steps in our engine, in turns, without
    the output head and the sampler. The rows are the root and the drafts. The request is pretended:
    its keys are whatever lies in its blocks, read and written as those of `context` tokens are. The
    pass over one row is our engine's own, as it serves a step without drafts.

    Raises:
        LookupError: a graph was not captured.
    """
    import torch

    runner = worker.model_runner
    graphs = runner.cudagraph_manager
    found: dict[int, list[float]] = {1: [], rows: []}
    descs = {
        desc.uniform_token_count: desc
        for desc in (graphs.graphs if graphs else ())
        if desc.num_reqs == 1 and desc.num_active_loras == 0
    }
    if missing := sorted(set(found) - set(descs)):
        raise LookupError(f"no FULL graph of one request of {missing} rows")
    with torch.inference_mode():
        for _ in range(PASSES):
            for count, times in found.items():
                pretend_request(runner, count, context)
                replay = functools.partial(graphs.run_fullgraph, descs[count])
                times.append(replay_seconds(replay, runner.device))
        pretend_request(runner, rows, context)
        widest = functools.partial(graphs.run_fullgraph, descs[rows])
        shown = _kernels(widest) if with_kernels else []
    one, many = (statistics.median(found[count]) for count in (1, rows))
    return {
        "rows": rows,
        "context": context,
        "ms": many * 1e3,
        "one_row_ms": one * 1e3,
        "ratio": many / one,
        "kernels": shown,
    }


def pretend_request(runner: Any, rows: int, context: int) -> None:
    """Set the target graphs' inputs to those of one request: `rows` rows after `context` tokens.

    Its blocks are the first of the cache. No request owns them, because the engine has no prefix
    cache and serves nothing. The rows are a chain; another tree differs in masks alone. Every real
    step sets all of these inputs anew.
    """
    import torch
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.input_batch import InputBatch, set_dummy_context

    tables, device = runner.block_tables, runner.device
    if context + rows > runner.max_model_len:
        raise ValueError(f"{context + rows} tokens, but max_model_len is {runner.max_model_len}")
    batch = InputBatch.make_dummy(1, rows, runner.input_buffers, max_query_len=rows)
    blocks, slots = tables.get_dummy_block_tables(1), tables.get_dummy_slot_mappings(rows)
    num_blocks = runner.kv_cache_config.num_blocks
    set_dummy_context(batch, tables, context, num_blocks, runner.max_model_len, blocks)
    for table, size, of_group in zip(blocks, tables.block_sizes, slots, strict=True):
        places = batch.positions
        of_group[:rows] = table[0, places // size] * size + places % size
    # It is not prepared as for a capture, so that attention's metadata have these lengths.
    runner.model_state.prepare_attn(
        batch, CUDAGraphMode.FULL, blocks, slots, runner.attn_groups, runner.kv_cache_config
    )
    tree = runner.model_state.graft.rows
    tree.num_rows[0], tree.prefix_lens[0], tree.plain_lens[0] = rows, context, 0
    tree.row_masks[:rows] = (2 << torch.arange(rows, device=device)) - 1


def _kernels(replay: Callable[[], object]) -> list[str]:
    return kernels.lines(kernels.kernels_of(replay), MOST_KERNELS)
