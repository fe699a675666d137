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
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_graft.base.errors import HookError
from vllm_graft.base.log import warning_once
from vllm_graft.base.metric import Numbers
from vllm_graft.base.options import flag
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.drafters.levels import Roots
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.lookup.references import UnreadPredictions
from vllm_graft.spec_decode.presets.node_count import leave_to_stock
from vllm_graft.spec_decode.startup.clock import KERNELS, StartClock
from vllm_graft.spec_decode.trees.tree import is_asked_for, num_candidates
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
    """How trees with one number of nodes are drafted. `batches`: numbers of requests for which they
    are drafted. `growth`: what grows them; plans of the same width and depth share it. `narrow`:
    whether they are drafted from the head's learned vocabulary."""

    shape: TreeShape
    batches: Collection[int]
    growth: Growth
    narrow: bool = False

    @property
    def runner_name(self) -> str:
        kind = "narrow_tree" if self.narrow else "tree"
        return f"{kind}_{self.shape.num_nodes}_cudagraph_manager"


class Sources:
    """Other sources of candidates than the draft, whose columns stand behind its levels. `extras`:
    the sources in the order of their columns. `ngrams`: the one among them that reads the requests'
    texts, if there is one. `unread`: counts predictions where no n-grams are looked for in them."""

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
        compares_ranks: whether trees are compared between ranks after each step.
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
        self.compares_ranks = is_asked_for()

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
    drafter: TreeDrafting, plan: TreePlan, batch: InputBatch, num_rejected: torch.Tensor,
    *, live: bool, skip_attn: bool, need_eager: bool, dp_sync_state: DPSyncState | None,
) -> None:  # fmt: skip
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
        runner, num_reqs, num_rows, uniform_token_count=width, dp_size=drafter.dp_size,
        dp_rank=drafter.dp_rank, need_eager=need_eager, dp_sync_state=dp_sync_state,
    )  # fmt: skip
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


class StockChain(DraftModelSpeculator):
    """Mixed into one of vLLM's speculators, in an engine that counts the nodes of a tree.

    CPython assigns a class to ``__class__`` only if both grow from the same one. `width`: drafts
    per request that the engine has columns for."""

    width: int
    num_speculative_steps: int

    def propose(
        self, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Draft a chain, int64 ``[num_reqs, width]``; columns behind it are of no meaning."""
        tokens = self.num_speculative_steps
        if num_speculative_tokens is not None:
            tokens = min(tokens, num_speculative_tokens)
        drafts = super().propose(*args, num_speculative_tokens=tokens, **kwargs)
        return torch.nn.functional.pad(drafts, (0, self.width - drafts.shape[1]))


def become_stock(drafter: TreeDrafting, why: str) -> None:
    """Turn a drafter that has loaded its draft, and grafted nothing yet, into a `StockChain`."""
    trees = drafter.trees
    depth = min(leave_to_stock(trees.engine_config), drafter.num_speculative_steps)
    stock = next(each for each in type(drafter).__mro__ if each.__module__.startswith("vllm."))
    chain: Any = drafter
    chain.__class__ = type(f"{StockChain.__name__}Over{stock.__name__}", (StockChain, stock), {})
    chain.width, chain.num_speculative_steps = trees.num_nodes, depth
    chain.draft_tokens = chain.draft_tokens.new_zeros(chain.max_num_reqs, depth)
    del chain.trees  # And with it the process that compiles its kernels ahead.
    warning_once(
        f"{flag('tree')} was turned on by a preset, but the loaded model rules trees out: {why}. "
        f"VLLM's own {stock.__name__} drafts chains of {depth} tokens instead"
    )
