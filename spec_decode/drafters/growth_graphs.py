"""The graphs in which a drafter grows its trees: planned, captured and replayed, one per plan."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from vllm_graft.spec_decode.tuning.scheduling import graph_counts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.dp_utils import DPSyncState
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.spec_decode.drafters.draft_trees import TreePlan
    from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting


def plan(drafter: TreeDrafting, cudagraph_mode: CUDAGraphMode) -> None:
    """Make the runners of the graphs of growing, a runner per plan."""
    auto = drafter.config.shape == "auto"
    counts = graph_counts(drafter.trees.engine_config) if auto else {}
    for each in drafter.trees.all_plans:
        runner = drafter.trees.graph_runner_cls(
            drafter.vllm_config, drafter.device, cudagraph_mode, drafter.graph_rows(each)
        )
        if auto:
            runner.plan_counts(counts.get(each.shape.num_nodes + 1, []))
        else:
            runner.keep_sizes(each.batches)
        # vLLM's memory profiling looks through vars(speculator) for managers to measure and
        # drop. So each runner is an attribute, not a value of a dictionary.
        setattr(drafter, each.runner_name, runner)


def capture(drafter: TreeDrafting) -> None:
    """Capture the graphs that `plan` planned."""
    # All requests are padding: the captured run writes to no tree and reads no cache.
    drafter.idx_mapping.fill_(-1)
    for each in drafter.trees.all_plans:
        each.growth.clear_prefix()
        runner = drafter.runner(each)
        assert runner is not None
        runner.capture_levels(functools.partial(_capture, drafter, each))


def _capture(drafter: TreeDrafting, plan: TreePlan, num_reqs: int) -> None:
    plan.growth.map_block_tables(drafter)
    metadata = plan.growth.metadata(num_reqs, drafter.max_model_len)
    drafter.grow_and_choose(plan, num_reqs, metadata)


def launch(
    drafter: TreeDrafting,
    plan: TreePlan,
    batch: InputBatch,
    num_rejected: torch.Tensor,
    *,
    live: bool,
    skip_attn: bool,
    need_eager: bool,
    dp_sync_state: DPSyncState | None,
) -> None:
    """Grow the trees of a batch, by a graph if one fits."""
    num_reqs, width, growth = batch.num_reqs, drafter.graph_rows(plan), plan.growth
    runner = drafter.runner(plan)
    growth.set_prefix(batch.seq_lens, num_rejected)
    num_rows = num_reqs * width
    if dp_sync_state is not None:
        # The dummy batch of a rank without requests is as large as the graph, padding included;
        # since vLLM 0.33 the ranks agree on the most requests that any of them has.
        num_reqs = min(num_reqs, dp_sync_state.num_reqs)
        dp_sync_state, num_rows = drafter._build_uniform_batch_dp_sync(
            dp_sync_state, num_reqs, num_query_per_req=width
        )
    desc, sync = dispatch_cg_and_sync_dp(
        runner,
        num_reqs,
        num_rows,
        uniform_token_count=width,
        dp_size=drafter.dp_size,
        dp_rank=drafter.dp_rank,
        need_eager=need_eager,
        dp_sync_state=dp_sync_state,
    )
    if not skip_attn:
        growth.map_block_tables(drafter)
    # Data-parallel ranks have agreed on a number of rows, padding included.
    num_reqs_padded = desc.num_tokens // width

    def grow() -> None:
        max_seq_len = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
        if desc.cg_mode == CUDAGraphMode.FULL:
            # The graph's bound: another length splits keys, and rounds, differently.
            max_seq_len = drafter.max_model_len
        metadata = None if skip_attn else growth.metadata(num_reqs_padded, max_seq_len)
        across_dp = None if sync is None else sync.num_tokens_across_dp
        drafter.grow_and_choose(plan, num_reqs_padded, metadata, across_dp)

    if desc.cg_mode != CUDAGraphMode.FULL:
        if live:
            captured = runner is not None and bool(runner.graphs)
            drafter.context.counters.count_launch("no_fit" if captured else "uncaptured")
        grow()
        return
    assert runner is not None
    if live:
        drafter.context.counters.draft_replays += 1
        runner.replay(desc, grow, functools.partial(_drafted, drafter, plan, num_reqs))
    else:
        runner.run_fullgraph(desc)


def _drafted(drafter: TreeDrafting, plan: TreePlan, num_reqs: int) -> list[torch.Tensor]:
    """Copies of a batch's drafts and of their topology."""
    slots, nodes = drafter.idx_mapping[:num_reqs].long(), plan.shape.num_nodes
    tree = drafter.context.tree
    return [
        drafter.draft_tokens[:num_reqs, :nodes].clone(),
        *(each[slots] for each in (tree.parents, tree.depths, tree.masks)),
    ]
