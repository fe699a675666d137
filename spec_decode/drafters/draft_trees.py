"""What a drafter holds besides vLLM's speculator: shapes, plans, memory, head and other sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_graft.base.errors import HookError
from vllm_graft.base.options import flag
from vllm_graft.hooks import manager
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.lookup.predictions import UnreadPredictions
from vllm_graft.spec_decode.startup.clock import StartClock
from vllm_graft.spec_decode.trees.shape import num_candidates
from vllm_graft.spec_decode.tuning.plan import bounds
from vllm_graft.spec_decode.verification.context import TreeContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.graph_runners.language.draft import DraftGraphRunner
    from vllm_graft.spec_decode.config.tree_config import TreeConfig
    from vllm_graft.spec_decode.drafters.base import Drafter, Extra, Growth
    from vllm_graft.spec_decode.heads.head import DraftHead
    from vllm_graft.spec_decode.lookup.ngrams import Ngrams
    from vllm_graft.spec_decode.startup.ahead import Ahead
    from vllm_graft.spec_decode.targets.dense.choice import KernelChoice
    from vllm_graft.spec_decode.trees.candidates import CandidateTable
    from vllm_graft.spec_decode.trees.shape import TreeShape


@dataclass(frozen=True)
class TreePlan:
    """How trees with one number of nodes are drafted.

    Attributes:
        shape: bounds of the trees.
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
        """The speculator's attribute that holds the plan's graph runner."""
        kind = "narrow_tree" if self.narrow else "tree"
        return f"{kind}_{self.shape.num_nodes}_cudagraph_manager"


class Sources:
    """Other sources of candidates than the draft, whose columns stand behind its levels.

    Attributes:
        extras: the sources in the order of their columns.
        ngrams: the one among them that reads the requests' texts; None unless it was asked for.
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

    def columns(self, num_nodes: int) -> int:
        """Columns of a table of candidates that all sources take for trees of so many nodes."""
        return sum(extra.columns(num_nodes) for extra in self.extras)

    def add(
        self,
        candidates: CandidateTable,
        drafter: Drafter,
        num_reqs: int,
        levels: int,
        num_nodes: int,
    ) -> int:
        """Let each source add its candidates behind the `levels` of the table. Capturable.

        Returns:
            The number of columns that were added.
        """
        first = num_candidates(candidates.topk, levels)
        added = 0
        for extra in self.extras:
            extra.add(
                candidates, drafter, num_reqs, levels, first=first + added, num_nodes=num_nodes
            )
            added += extra.columns(num_nodes)
        return added

    def require_columns(self, growths: Collection[Growth], num_nodes: int) -> None:
        """Refuse a growth whose table has no room for the sources.

        Raises:
            HookError: its drafter did not allocate these columns.
        """
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

    Args:
        config: the section ``graft.tree``.
        engine_config: the engine's configuration.

    Attributes:
        graph_runner_cls: captures and replays the graphs of growing.
        batches: the shapes of the trees, each with the numbers of requests that it is drafted for.
        shape: bounds of all of them.
        plans: by the number of nodes.
        narrow_plans: likewise, of drafts from the head's learned vocabulary.
        context: what the tree parts of this worker share.
        head: finds the best tokens of states.
        first: log-probabilities f32 and token ids int64 of the root's best children,
            ``[max_reqs, topk]`` each.
        sources: of candidates besides the draft.
        attention_choices: which kernels were measured to be the fastest.
        graph_bytes: device bytes of all graphs of drafting.
        clock: what the start took.
        ahead: kernels that are compiled ahead.
    """

    batches: Mapping[TreeShape, list[int]]
    shape: TreeShape
    context: TreeContext
    head: DraftHead
    first: tuple[torch.Tensor, torch.Tensor]
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
        """The plans of the full vocabulary, then those of the learned vocabulary."""
        return [*self.plans.values(), *self.narrow_plans.values()]

    def set_shapes(self, batches: Mapping[TreeShape, list[int]]) -> None:
        """Plan for these shapes."""
        self.batches, self.shape = batches, bounds(batches)

    def plan_for(self, num_nodes: int) -> TreePlan:
        """The smallest plan with at least `num_nodes`: its first nodes are the best such tree."""
        return self.plans[min(nodes for nodes in self.plans if nodes >= num_nodes)]

    def plan_of_step(self, num_nodes: int, num_reqs: int) -> TreePlan:
        """The plan of a step, which may be one of the learned vocabulary."""
        plan, learned = self.plan_for(num_nodes), self.head.learned
        nodes = plan.shape.num_nodes
        narrows = learned is not None and learned.narrows(nodes, num_reqs)
        return self.narrow_plans[nodes] if narrows else plan

    # --- memory -----------------------------------------------------------------------------------

    def allocate_context(
        self, layers: Mapping[str, Any], max_reqs: int, max_tokens: int, device: torch.device
    ) -> None:
        """Allocate what the tree parts of this worker share.

        Args:
            layers: the attention layers that trees run over, by name.
            max_reqs: most requests of a batch.
            max_tokens: most rows of a batch.
            device: where it lies.
        """
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
        first = (max_reqs, shape.topk)
        self.first = (
            torch.zeros(first, dtype=torch.float32, device=device),
            torch.zeros(first, dtype=torch.int64, device=device),
        )

    def set_growths(self, growths: Mapping[TreeShape, Growth]) -> None:
        """Make the plans, by what grows the trees of each shape.

        Raises:
            HookError: a growth has no room for the other sources.
        """
        self.sources.require_columns(growths.values(), self.shape.num_nodes)
        self.plans = {
            tree.num_nodes: TreePlan(tree, batches, growths[tree])
            for tree, batches in self.batches.items()
        }
        if (learned := self.head.learned) is not None:
            self.context.emitted = learned.emitted
            self.context.watches = (*self.context.watches, learned)
            if not self.config.learn_salted:
                self.context.teaches = learned.keep_apart(len(self.first[0]))
            self.narrow_plans = {
                nodes: dataclasses.replace(plan, narrow=True) for nodes, plan in self.plans.items()
            }
