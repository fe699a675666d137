"""What a drafter holds besides vLLM's speculator: shapes, plans and graphs, memory, sources."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from vllm_graft.base.errors import HookError
from vllm_graft.base.options import flag
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.drafters.levels import Roots
from vllm_graft.spec_decode.kernels.attention.attention_call import AttentionWorkspace
from vllm_graft.spec_decode.lookup.references import UnreadPredictions
from vllm_graft.spec_decode.startup.clock import StartClock
from vllm_graft.spec_decode.trees.tree import num_candidates
from vllm_graft.spec_decode.tuning.plan import bounds
from vllm_graft.spec_decode.tuning.scheduling import graph_counts
from vllm_graft.spec_decode.verification.context import TreeContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.dp_utils import DPSyncState
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.graph_runners.language.draft import DraftGraphRunner
    from vllm_graft.spec_decode.config.tree_config import TreeConfig
    from vllm_graft.spec_decode.drafters.base import Drafter, Extra, Growth
    from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
    from vllm_graft.spec_decode.heads.head import DraftHead
    from vllm_graft.spec_decode.lookup.ngrams import Ngrams
    from vllm_graft.spec_decode.startup.ahead import Ahead
    from vllm_graft.spec_decode.targets.dense.two_pass import KernelChoice
    from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape


@dataclass(frozen=True)
class TreePlan:
    """How trees with one number of nodes are drafted.

    Attributes:
        batches: numbers of requests for which they are drafted.
        growth: what grows them; plans of the same width and depth share it.
        narrow: whether they are drafted from the head's learned vocabulary.
    """

    shape: TreeShape
    batches: Collection[int]
    growth: Growth
    narrow: bool = False

    @property
    def runner_name(self) -> str:
        kind = "narrow_tree" if self.narrow else "tree"
        return f"{kind}_{self.shape.num_nodes}_cudagraph_manager"


class Sources:
    """Other sources of candidates than the draft, whose columns stand behind its levels.

    Attributes:
        extras: the sources in the order of their columns.
        ngrams: the one among them that reads the requests' texts, if there is one.
        unread: counts predictions where no n-grams are looked for in them.
    """

    def __init__(self, *extras: Extra) -> None:
        self.extras = extras
        self.ngrams: Ngrams | None = None
        self.unread: UnreadPredictions | None = None

    def attach(self, context: TreeContext, ngrams: Ngrams | None) -> None:
        """Let n-grams, or the counter of predictions that nobody reads, watch the requests."""
        if ngrams is not None:
            self.ngrams = ngrams
            self.extras = (*self.extras, ngrams)
            context.watches = (*context.watches, ngrams)
            context.extra_nodes, context.extra_counts = ngrams.nodes, ngrams.counts
        if ngrams is None or not ngrams.state.reference:
            self.unread = UnreadPredictions()
            context.watches = (*context.watches, self.unread)

    @property
    def of_memory(self) -> tuple[torch.Tensor, int] | None:
        """The paths of each row that are from the memory, as bits, and the paths of a row."""
        state = None if self.ngrams is None else self.ngrams.state
        return None if state is None or state.sources is None else (state.sources, state.matches)

    def columns(self, num_nodes: int) -> int:
        return sum(extra.columns(num_nodes) for extra in self.extras)

    def add(
        self,
        candidates: CandidateTable,
        drafter: Drafter,
        num_reqs: int,
        levels: int,
        num_nodes: int,
    ) -> int:
        """Let each source add its candidates behind the table's `levels`; return their columns."""
        first = num_candidates(candidates.topk, levels)
        added = 0
        for extra in self.extras:
            extra.add(
                candidates, drafter, num_reqs, levels, first=first + added, num_nodes=num_nodes
            )
            added += extra.columns(num_nodes)
        return added

    def require_columns(self, growths: Collection[Growth], num_nodes: int) -> None:
        """Raise a HookError if a growth's table has no columns for the sources."""
        wanted = self.columns(num_nodes)
        for growth in growths:
            table = growth.candidates
            levels = num_candidates(table.topk, table.steps)
            if table.scores.shape[1] < levels + wanted:
                raise HookError(
                    f"{flag('tree', 'ngram')} needs {wanted} more columns in the table "
                    f"of candidates than {type(growth).__name__} has: allocate it with "
                    "extra=drafter.extra_columns, or drop the key"
                )


class DraftTrees:
    """What a drafter of trees holds.

    A drafter makes it before vLLM's speculator is built, plans its shapes behind that, and
    allocates its memory when the draft is loaded.

    Attributes:
        batches: the shapes of the trees, each with the numbers of requests that it is drafted for.
        shape: bounds of all of them.
        plans: by the number of nodes; `narrow_plans` are of the head's learned vocabulary.
        attention_choices: which kernels were measured to be the fastest.
        graph_bytes: device bytes of all graphs of drafting.
    """

    batches: Mapping[TreeShape, list[int]]
    shape: TreeShape
    context: TreeContext
    head: DraftHead
    roots: Roots
    ahead: Ahead

    def __init__(self, config: TreeConfig, engine_config: VllmConfig) -> None:
        self.config, self.engine_config = config, engine_config
        self.graph_runner_cls: type[DraftGraphRunner] = manager.resolve(
            "graft_draft_graph_runners", config.graph_runner, "tree", "graph_runner"
        )
        self.plans: dict[int, TreePlan] = {}
        self.narrow_plans: dict[int, TreePlan] = {}
        self.sources = Sources()
        self.attention_choices: list[KernelChoice] = []
        self.graph_bytes = 0
        self.clock = StartClock()

    @property
    def num_nodes(self) -> int:
        """The largest number of nodes that the engine asks for."""
        speculative = self.engine_config.speculative_config
        assert speculative is not None
        nodes: int = speculative.num_speculative_tokens
        return nodes

    @property
    def all_plans(self) -> list[TreePlan]:
        return [*self.plans.values(), *self.narrow_plans.values()]

    def set_shapes(self, batches: Mapping[TreeShape, list[int]]) -> None:
        self.batches, self.shape = batches, bounds(batches)

    def plan_for(self, num_nodes: int) -> TreePlan:
        """The smallest plan with at least `num_nodes`: its first nodes are the best such tree."""
        return self.plans[min(nodes for nodes in self.plans if nodes >= num_nodes)]

    def plan_of_step(self, num_nodes: int, num_reqs: int) -> TreePlan:
        plan, learned = self.plan_for(num_nodes), self.head.learned
        nodes = plan.shape.num_nodes
        narrows = learned is not None and learned.narrows(nodes, num_reqs)
        return self.narrow_plans[nodes] if narrows else plan

    # --- memory -----------------------------------------------------------------------------------

    def allocate_context(
        self, layers: Mapping[str, Any], max_reqs: int, max_tokens: int, device: torch.device
    ) -> None:
        """Allocate what the tree parts of this worker share, for the attention layers of trees."""
        shape = self.shape
        workspace = AttentionWorkspace.allocate(
            max_reqs,
            max(shape.num_nodes + 1, shape.topk),
            # A chain of a draft whose layers stay as they are has none.
            max((layer.num_heads for layer in layers.values()), default=1),
            max((layer.head_size for layer in layers.values()), default=1),
            max_splits=64,
            device=device,
        )
        self.context = TreeContext.allocate(shape, max_reqs, max_tokens, workspace, device)
        self.context.draft_window = self.config.draft_window or 0
        self.context.recurrent_form = self.config.recurrent_form
        self.roots = Roots(max_reqs, shape.topk, device)

    def set_growths(self, growths: Mapping[TreeShape, Growth]) -> None:
        self.sources.require_columns(growths.values(), self.shape.num_nodes)
        self.plans = {
            tree.num_nodes: TreePlan(tree, batches, growths[tree])
            for tree, batches in self.batches.items()
        }
        if (learned := self.head.learned) is not None:
            self.context.emitted = learned.emitted
            self.context.watches = (*self.context.watches, learned)
            if not self.config.learn_salted:
                self.context.teaches = learned.keep_apart(len(self.roots.best[0]))
            self.narrow_plans = {
                nodes: dataclasses.replace(plan, narrow=True) for nodes, plan in self.plans.items()
            }


def plan_graphs(drafter: TreeDrafting, cudagraph_mode: CUDAGraphMode) -> None:
    """Make the runners of the graphs of growing, one per plan."""
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


def capture_graphs(drafter: TreeDrafting) -> None:
    """Capture the graphs that `plan_graphs` planned."""
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


def launch_growth(
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
        num_rows = dp_sync_state.num_reqs * width
        dp_sync_state = replace(
            dp_sync_state,
            num_tokens_across_dp=torch.full_like(dp_sync_state.num_tokens_across_dp, num_rows),
            uniform_token_count=width,
            eager=False,
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
    slots, nodes = drafter.idx_mapping[:num_reqs].long(), plan.shape.num_nodes
    tree = drafter.context.tree
    return [
        drafter.draft_tokens[:num_reqs, :nodes].clone(),
        *(each[slots] for each in (tree.parents, tree.depths, tree.masks)),
    ]
