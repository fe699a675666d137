"""Trees of drafts that come from one pass over a block of positions."""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_graft.base.errors import HookError
from vllm_graft.base.options import flag, without_section
from vllm_graft.graph_runners.language.widths import plan_widths, request_counts
from vllm_graft.spec_decode.config.tree_config import NAME
from vllm_graft.spec_decode.drafters.base import Children, PasslessGrowth
from vllm_graft.spec_decode.drafters.draft_trees import TreePlan
from vllm_graft.spec_decode.drafters.levels import growths_by_levels
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.heads.head import SHARPNESS
from vllm_graft.spec_decode.kernels.topk import Noise, topk_logprobs
from vllm_graft.spec_decode.models.drafts import block_positions
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape
from vllm_graft.spec_decode.tuning.scheduling import graph_counts, plan_shapes, tree_policy
from vllm_graft.spec_decode.verification.context import AcceptedRows


class Lattice(Protocol):
    """Tokens and scores at each depth of a block. All of its methods are capturable. R is the
    number of requests, padding included, and K the number of children of a node, which is also the
    number of nodes of a level that get children."""

    def first(self) -> Children:
        """The root's best children, ``[R, K]`` each, best first."""

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        """The best children of the frontier, ``[R, K, K]`` each, the siblings best first. Levels
        are asked for in order; the root's children are level 0. The frontier of `table` is that of
        ``level - 1``, and `tokens`, int64 ``[R * K]``, are its nodes'."""


class Marginals:
    """Positions that are independent of each other: all nodes of a level get the same children.
    `logp` f32 and `tokens` int64 are each position's best, ``[R, positions, K]``."""

    def __init__(self, logp: torch.Tensor, tokens: torch.Tensor) -> None:
        self._logp, self._tokens = logp, tokens

    def first(self) -> Children:
        return self._logp[:, 0], self._tokens[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        logp, ids = (each[:, level, None] for each in (self._logp, self._tokens))
        nodes = table.topk
        return logp.expand(-1, nodes, -1), ids.expand(-1, nodes, -1)


class Edges:
    """A few candidates per position, and a score for each pair of neighbours. `ids` int64 ``[R,
    positions, C]`` are the target's; `scores` f32 ``[R, positions, C, C]`` are by the candidate
    before and the candidate. Before the first position stands one candidate, the first."""

    def __init__(self, ids: torch.Tensor, scores: torch.Tensor, topk: int) -> None:
        self._ids, self._scores, self._topk = ids, scores.float(), topk
        self._places: torch.Tensor | None = None
        self._first_candidate = 0

    def first(self) -> Children:
        logp, ids = self._best(0, self._scores[:, 0, :1])
        return logp[:, 0], ids[:, 0]

    def below(self, level: int, table: CandidateTable, tokens: torch.Tensor) -> Children:
        assert self._places is not None
        num_reqs = len(self._ids)
        # Where the frontier's nodes stand among the candidates of their position.
        newest = table.frontier_candidates[:num_reqs].long() - self._first_candidate
        before = self._places.gather(1, newest)
        width = self._scores.shape[-1]
        rows = self._scores[:, level].gather(1, before[:, :, None].expand(-1, -1, width))
        self._first_candidate += self._topk if level == 1 else self._topk**2
        return self._best(level, rows)

    def _best(self, level: int, scores: torch.Tensor) -> Children:
        """The best candidates by scores ``[R, nodes, C]``; notes their places."""
        num_reqs, nodes, width = scores.shape
        logp, places = topk_logprobs(scores.reshape(-1, width), self._topk, sharpness=SHARPNESS)
        self._places = places.view(num_reqs, nodes * self._topk)
        ids = self._ids[:, level].gather(1, self._places)
        shape = (num_reqs, nodes, self._topk)
        return logp.view(shape), ids.view(shape)


class BlockGrowth(PasslessGrowth):
    """The scores of all depths are there when the tree is grown (see `Lattice`). ``steps`` of its
    shape is at most the number of positions that predict. The best nodes are kept by the sum of
    log-probabilities from the root, which for independent positions is the product of the marginals
    (DDTree, arXiv 2604.12989)."""

    def grow(
        self, drafter: Any, num_reqs: int, *passes: Any, num_nodes: int, narrow: bool = False
    ) -> int:
        lattice, frontier = drafter.lattice, self.tokens[: num_reqs * self.shape.topk]
        return self.fill(
            lattice.first(),
            lambda level: lattice.below(level, self.candidates, frontier),
            num_reqs,
            num_nodes,
        )


class BlockTrees(TreeDrafting, DFlashSpeculator):
    """Mixed into one of vLLM's `DFlashSpeculator` classes.

    vLLM's own step stays as it is: it projects the target's states to the draft's K/V, then runs
    the draft once over the last token and the masks behind it. Where a chain samples from what that
    pass leaves, a tree is grown from it, inside the graph that vLLM captures of the step. The
    draft's layers know of no tree: their K/V is made of the accepted rows, in a chain's order.

    The step of each plan is one over as many positions as its trees have levels (`drafting`), as
    vLLM runs for a smaller ``num_speculative_tokens``. Where positions see those behind them, a
    shorter block may change how much is accepted, and never what is emitted."""

    seams = ("block",)
    grafts_draft = grows_by_levels = False
    grows_from_block = True
    cuts_positions = True  # A block may be shorter than what the draft was loaded for.
    drafted: TreePlan | None = None  # The plan for which vLLM's step drafts, within one.
    lattice: Lattice | None = None  # What the block has left, while a tree is grown from it.
    num_query_per_req: int  # VLLM's name for the rows of a request in the one pass.
    query_cudagraph_manager: Any  # The graphs of the step, set by `drafting`.
    _aux_staging: torch.Tensor | None  # Since vLLM 0.33: the target's states, to be combined.

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.draft_tokens: torch.Tensor = torch.zeros(
            self.max_num_reqs, self.trees.num_nodes, dtype=torch.int64, device=device
        )
        # Dummy batches have the request-state indices of real ones.
        self._live = torch.zeros(1, dtype=torch.bool, device=device)
        self._was_launched = False
        # The states are combined before their rows are moved, outside of the graph.
        self._aux_staging = None

    # --- shapes -----------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Positions that predict a token in the longest block: the deepest level of a tree."""
        return block_positions(self.config, self.trees.engine_config.speculative_config)

    @property
    def plan(self) -> TreePlan:
        return self.drafted or self.trees.plans[max(self.trees.plans)]

    @property
    def topk(self) -> int:
        return self.plan.shape.topk

    @property
    def positions(self) -> int:
        return self.positions_of(self.plan)

    def positions_of(self, plan: TreePlan) -> int:
        """Positions that predict a token in the blocks of a plan."""
        return min(plan.shape.steps, plan.shape.num_nodes) if self.cuts_positions else self.depth

    def rows_of(self, plan: TreePlan) -> int:
        """Rows per request of a plan's pass: the last token may predict none."""
        return self.positions_of(plan) + (not self.sample_from_anchor)

    def stock_config(self) -> VllmConfig:
        return chain_config(self.trees.engine_config, self.depth)

    def plan_batches(self) -> dict[TreeShape, list[int]]:
        """A shape for each number of nodes that the engine may ask for, and its batches. Raises
        `HookError` if a plugin's policy has shapes that the block or its candidates don't hold."""
        config = self.config
        policy = tree_policy(config, self.trees.engine_config.speculative_config)
        batches = plan_shapes(policy, config, self.trees.engine_config)
        for shape in batches:
            if min(shape.steps, shape.num_nodes) > self.depth or shape.topk > config.topk:
                raise HookError(
                    f"{flag('tree', 'policy')} {config.policy!r} wants topk {shape.topk} and steps "
                    f"{shape.steps} for {shape.num_nodes} nodes, "
                    f"but the most that this block drafter has are topk {config.topk} "
                    f"and steps {self.depth} "
                    f"({flag('tree', 'topk')}, {flag('tree', 'steps')} and the number of nodes): "
                    "raise these, or drop the policy"
                )
        return batches

    @contextlib.contextmanager
    def drafting(self, plan: TreePlan) -> Iterator[None]:
        """Within it, vLLM's step is one over the block of a plan, with the plan's graphs."""
        stock = self.num_speculative_steps, self.num_query_per_req, self.query_cudagraph_manager
        self.num_speculative_steps = self.positions_of(plan)
        self.num_query_per_req = self.rows_of(plan)
        self.query_cudagraph_manager = self.block_graphs(plan)
        self.drafted = plan
        try:
            yield
        finally:
            self.drafted = None
            (self.num_speculative_steps, self.num_query_per_req, self.query_cudagraph_manager) = (
                stock
            )

    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, BlockGrowth]:
        self.accepted = AcceptedRows(self.input_buffers, self.hidden_states)
        most, extra = self.max_num_reqs, self.extra_columns
        self.growths = growths_by_levels(
            shapes, lambda shape: BlockGrowth(shape, most, self.device, extra=extra)
        )
        return self.growths

    @property
    def growth_bytes(self) -> int:
        return sum(growth.num_bytes for growth in set(self.growths.values()))

    # --- graphs -----------------------------------------------------------------------------------

    def plan_growth_graphs(self, cudagraph_mode: CUDAGraphMode) -> None:
        stock, self.query_cudagraph_manager = self.query_cudagraph_manager, None
        assert stock is not None
        for plan in self.trees.plans.values():
            width = self.rows_of(plan)
            graphs = type(stock)(self.vllm_config, self.device, stock.cudagraph_mode, width)
            plan_widths(graphs, {width: self.graph_counts_of(plan)})
            # See `plan_graphs`: each is an attribute.
            setattr(self, _manager_name(plan), graphs)

    def graph_counts_of(self, plan: TreePlan) -> list[int]:
        compilation = self.trees.engine_config.compilation_config
        rows = (compilation.max_cudagraph_capture_size or 0) // self.rows_of(plan)
        if plan is self.trees.plan_for(0):
            # A step without drafts runs the shortest block, to keep the draft's K/V.
            return request_counts(min(self.max_num_reqs, rows))
        if self.config.shape == "auto":
            return graph_counts(self.trees.engine_config).get(plan.shape.num_nodes + 1, [])
        return request_counts(min(max(plan.batches, default=0), rows))

    def block_graphs(self, plan: TreePlan) -> Any:
        return getattr(self, _manager_name(plan), None)

    def capture_first_pass(self) -> None:
        """Capture vLLM's step for each plan; all of its requests are padding."""
        self._live.zero_()
        for plan in self.trees.plans.values():
            with self.drafting(plan):
                super(TreeDrafting, self).capture()

    def capture_growths(self) -> None:
        """Do nothing: the step's graphs hold the growth."""

    def draft_graphs(self) -> list[Any]:
        managers = [self.block_graphs(plan) for plan in self.trees.plans.values()]
        return [graph for manager in managers if manager for graph in manager.graphs.values()]

    def step_graphs(
        self, nodes: int, *, narrow: bool = False
    ) -> list[tuple[CudaGraphManager | None, int]] | None:
        plan = self.trees.plan_for(nodes)
        self._live.zero_()
        # The last capture was of another size: its queries may be more than a graph has rows.
        self.input_buffers.query_start_loc.zero_()
        self.input_buffers.seq_lens.zero_()
        return [(self.block_graphs(plan), self.rows_of(plan))]

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # The rows of a verified tree, of which the accepted ones come first. Steps that verify more
        # than they draft store the others before the graph.
        nodes = self.trees.num_nodes if self.drafted is None else self.drafted.shape.num_nodes
        most: int = self.max_num_tokens
        return min(num_reqs * (nodes + 1), most)

    # --- a step -----------------------------------------------------------------------------------

    def propose(
        self, *args: Any, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        nodes = self.trees.num_nodes if num_speculative_tokens is None else num_speculative_tokens
        with self.drafting(self.trees.plan_for(nodes)):
            return super().propose(*args, num_speculative_tokens=num_speculative_tokens, **kwargs)

    def first_pass(self, *args: Any, dummy_run: bool, samples: bool, **kwargs: Any) -> InputBatch:
        """Run vLLM's whole step over the accepted rows; it drafts by `_generate_draft`."""
        self._live.fill_(not dummy_run)
        self._was_launched = False
        batch = super().first_pass(*args, dummy_run=dummy_run, samples=samples, **kwargs)
        if samples and not dummy_run:
            self._count_step(batch.num_reqs)
        return batch

    def _count_step(self, num_reqs: int) -> None:
        counters = self.context.counters
        counters.positions_drafted += num_reqs * self.positions
        if self._was_launched:
            counters.count_launch("no_fit" if self.draft_graphs() else "uncaptured")
        else:
            counters.draft_replays += 1

    def _generate_draft(
        self, num_reqs: int, num_tokens_padded: int, attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None, num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:  # fmt: skip
        """Run the block, and grow a tree from it where a chain is sampled. Capturable."""
        self._was_launched = True
        states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        rows = num_reqs * self.positions
        slots = self.sample_idx_mapping[: rows : self.positions]
        self.idx_mapping[:num_reqs].copy_(torch.where(self._live, slots, -1))
        self.lattice = self.make_lattice(num_reqs, self.read_states(num_reqs, states))
        try:
            self.grow_and_choose(self.plan, num_reqs, None, num_tokens_across_dp)
        finally:
            self.lattice = None

    def read_states(self, num_reqs: int, states: torch.Tensor) -> torch.Tensor:
        """The rows of a pass that `make_lattice` reads: those that predict. Capturable."""
        return states[self.sample_indices[: num_reqs * self.positions]]

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Lattice:
        """What the block says of every depth, from what `read_states` returns. Capturable."""
        raise NotImplementedError

    def draft_tree(self, plan: TreePlan, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first pass has drafted the tree."""

    def draws(self, num_reqs: int) -> torch.Tensor:
        """Positions by which the target's draws are keyed, int64 ``[num_reqs, positions]``."""
        positions = self.sample_pos[: num_reqs * self.positions]
        return positions.view(num_reqs, self.positions) - 1

    def level_noise(self, num_reqs: int) -> Callable[[int, int], Noise | None]:
        """The noise of the target's draws of all levels, None to rank without. Capturable. The
        function takes the level, and nodes per request above it: 1 at the first, ``topk`` below."""
        # Of all levels at once; those of a level are contiguous, as kernels read them.
        draws = self.draws(num_reqs).t().contiguous()
        below = draws.repeat_interleave(self.topk, 1)

        def noise(level: int, nodes: int) -> Noise | None:
            positions = (below if level else draws)[level]
            return self.noise(num_reqs, positions, rows=nodes, offset=0)

        return noise

    def own_head_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of the model's own head, or of its copy in FP8, over rows of states. Capturable.
        The draft has ``compute_draft_logits``, as those have whose logits get biases."""
        if self.head.fp8 is not None:
            return self.head.logits(states)
        logits: torch.Tensor = self.model.compute_draft_logits(states)
        return logits

    def block_roots(self, num_reqs: int) -> torch.Tensor:
        """The last token of each request, the target's, int ``[num_reqs]``."""
        width = self.num_query_per_req
        return self.input_buffers.input_ids[: num_reqs * width : width]

    def report(self) -> dict[str, Any]:
        plans = [self._describe(plan) for _, plan in sorted(self.trees.plans.items())]
        return {**super().report(), "blocks": plans}

    def _describe(self, plan: TreePlan) -> dict[str, Any]:
        manager, batches = self.block_graphs(plan), plan.batches
        return {
            "nodes": plan.shape.num_nodes,
            "topk": plan.shape.topk,
            "positions": self.positions_of(plan),
            # Numbers of requests, the first and the last.
            "batches": [min(batches), max(batches)] if batches else [],
            "graphs": sorted(desc.num_reqs for desc in manager.graphs) if manager else [],
        }


def _manager_name(plan: TreePlan) -> str:
    return f"block_{plan.shape.num_nodes}_cudagraph_manager"


def chain_config(vllm_config: VllmConfig, depth: int) -> VllmConfig:
    """What vLLM would have for chains of ``depth`` tokens, with ``graft.tree`` taken out.

    To the engine ``num_speculative_tokens`` is the nodes of a tree; to vLLM's speculator, and to
    the draft that it loads, the depth of a block. vLLM derives further configurations from what its
    speculator has, which validates again, sets sizes and calls the platform: none of that may reach
    the engine's objects. Layers are registered in both."""
    chain = copy.copy(vllm_config)
    chain.speculative_config = copy.copy(vllm_config.speculative_config)
    assert chain.speculative_config is not None
    chain.speculative_config.num_speculative_tokens = depth
    # A block costs the same at any number of nodes.
    chain.speculative_config.num_speculative_tokens_per_batch_size = None
    chain.compilation_config = copy.copy(vllm_config.compilation_config)
    chain.scheduler_config = copy.copy(vllm_config.scheduler_config)
    without_section(chain, NAME)
    return chain
