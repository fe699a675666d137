"""What ``graft_info()`` says about a drafter of trees."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.base.metric import Numbers
from vllm_graft.spec_decode.startup.clock import KERNELS

if TYPE_CHECKING:
    from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting


def describe(draft: TreeDrafting) -> dict[str, Any]:
    """Shapes, device bytes, graphs and counters as plain values."""
    trees, ngrams = draft.trees, draft.trees.sources.ngrams
    return {
        **dataclasses.asdict(trees.shape),
        "shapes": [dataclasses.asdict(shape) for shape in trees.batches],
        "draft_vocab": None if draft.head.target_ids is None else len(draft.head.target_ids),
        "fp8_head_bytes": 0 if draft.head.fp8 is None else draft.head.fp8.num_bytes,
        "hot_tokens": None if draft.head.learned is None else draft.head.learned.report(),
        "draft_graphs": len(draft.draft_graphs()),
        "draft_graph_bytes": trees.graph_bytes,
        "recurrent_input_bytes": draft.context.kept_bytes,
        "level_bytes": draft.growth_bytes,
        "draft_window": draft.config.draft_window,
        "attention": [choice.report() for choice in trees.attention_choices],
        "ngrams": None if ngrams is None else ngrams.report(),
        "start": _start(draft),
        **_checks(draft),
        **dataclasses.asdict(draft.context.counters),
    }


def count(draft: TreeDrafting) -> Numbers:
    """The numbers of the metrics of trees that a worker counts; see `tree_metrics`."""
    counted, sources = draft.context.counters, draft.trees.sources
    return {
        "candidates_drafted": counted.nodes_drafted,
        "block_positions_drafted": counted.positions_drafted,
        "draft_replays": counted.draft_replays,
        "draft_launches": counted.draft_launches,
        "target_replays": {"trees": counted.tree_replays, "mixed": counted.mixed_replays},
        "target_launches": {"trees": counted.tree_launches, "mixed": counted.mixed_launches},
        "cut_steps": counted.cut_steps,
        "chunked_steps": counted.chunked_steps,
        "draft_graphs": len(draft.draft_graphs()),
        "draft_graph_bytes": draft.trees.graph_bytes,
        "draft_window": draft.context.draft_window,
        "recurrent_input_bytes": draft.context.kept_bytes,
        "connector_draft_layers": draft.context.saves.draft_layers,
        "start_seconds": dict(draft.trees.clock.seconds),
        "start_kernels": _kernels(draft),
        **({} if draft.head.learned is None else draft.head.learned.numbers()),
        **({} if sources.ngrams is None else sources.ngrams.numbers()),
        **({} if sources.unread is None else sources.unread.numbers()),
    }


def _start(draft: TreeDrafting) -> dict[str, Any]:
    seconds = {name: round(took, 2) for name, took in draft.trees.clock.seconds.items()}
    return {"seconds": seconds, "kernels": _kernels(draft), "ahead": draft.trees.ahead.report()}


def _kernels(draft: TreeDrafting) -> dict[str, int]:
    counts = (
        draft.trees.ahead.compiled,
        len(draft.trees.ahead.failed),
        draft.trees.clock.compiled,
        draft.trees.clock.loaded,
    )
    return dict(zip(KERNELS, counts, strict=True))


def _checks(draft: TreeDrafting) -> dict[str, dict[int, list[int]]]:
    found: dict[str, dict[int, list[int]]] = {}
    for plan in draft.trees.all_plans:
        runner, nodes = draft.runner(plan), plan.shape.num_nodes
        for outcome, sizes in (runner.checks() if runner else {}).items():
            of_nodes = found.setdefault(f"draft_graphs_{outcome}", {})
            of_nodes[nodes] = sorted({*of_nodes.get(nodes, ()), *sizes})
    return found


def taken(device: torch.device) -> int:
    """Device bytes in use by all processes; 0 without CUDA."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
