"""Drafting trees (EAGLE-2, Li et al. 2024, arXiv 2406.16858), for any speculator of vLLM's."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

from vllm_graft.base.metric import Numbers
from vllm_graft.spec_decode.drafters.draft_report import count, describe, taken
from vllm_graft.spec_decode.drafters.tree_loading import TreeLoading
from vllm_graft.spec_decode.drafters.tree_plan import TreePlan
from vllm_graft.spec_decode.kernels.finish import finish_tree
from vllm_graft.spec_decode.kernels.topk import Noise
from vllm_graft.spec_decode.trees.shape import num_candidates
from vllm_graft.spec_decode.tuning.attention_timing import choose_target_kernels
from vllm_graft.spec_decode.tuning.scheduling import graph_counts
from vllm_graft.spec_decode.verification.rank_check import check_trees, is_asked_for

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.dp_utils import DPSyncState
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.graph_runners.language.draft import DraftGraphRunner


class TreeDrafting(TreeLoading):
    """Drafts a tree where the speculator that it is mixed into drafts a chain.

    A subclass puts it before one of vLLM's speculators and says how the draft model runs: it
    defines `first_pass`, `capture_first_pass`, `make_growths` and the members of `Drafter` that are
    missing here.
    """

    @abstractmethod
    def first_pass(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool,
        samples: bool,
        **kwargs: Any,
    ) -> InputBatch:
        """Run the draft over what was accepted, and leave what `draft_first_level` needs.

        Arguments are those of vLLM's ``propose``, and ``samples``: whether anybody will read the
        first level. Returns the batch whose rows the pass ran over.
        """

    @abstractmethod
    def capture_first_pass(self) -> None:
        """Capture the graphs of `first_pass`."""

    def report(self) -> dict[str, Any]:
        """What `graft_info()` says about this part."""
        return describe(self)

    def numbers(self) -> Numbers:
        """The numbers of this part's metrics."""
        return count(self)

    # --- graphs -----------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan the graphs of the first pass, which are vLLM's own, and those of growing."""
        super().init_cudagraph_manager(cudagraph_mode)
        with self.clock.part("wait"):
            self.ahead.finish()
        if not self.attention_choices and self.shape.topk > 1:
            # vLLM has no K/V cache yet, so there is memory to measure in, which is given back.
            with self.clock.part("attention"):
                self.attention_choices = choose_target_kernels(
                    self.engine_config,
                    self.config,
                    self.draft_attn_layer_names,
                    self.context.workspace,
                    self.device,
                )
        self.plan_growth_graphs(cudagraph_mode)

    def plan_growth_graphs(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Make the runners of the graphs of growing, a runner per plan."""
        auto = self.config.shape == "auto"
        counts = graph_counts(self.engine_config) if auto else {}
        for plan in self.all_plans:
            runner = self.graph_runner_cls(
                self.vllm_config, self.device, cudagraph_mode, self.graph_rows(plan)
            )
            if auto:
                runner.plan_counts(counts.get(plan.shape.num_nodes + 1, []))
            else:
                runner.keep_sizes(plan.batches)
            # vLLM's memory profiling looks through vars(speculator) for managers to measure and
            # drop. So each runner is an attribute, not a value of a dictionary.
            setattr(self, plan.runner_name, runner)

    def graph_rows(self, plan: TreePlan) -> int:
        """Rows per request in the graphs of a growth: those of a level."""
        return plan.shape.topk

    def num_candidates(self, plan: TreePlan) -> int:
        """Nodes that are scored for a request."""
        return plan.shape.num_candidates

    def step_graphs(
        self, nodes: int, *, narrow: bool = False
    ) -> list[tuple[CudaGraphManager | None, int]] | None:
        """The graphs that a step with so many nodes replays, each with its rows per request.

        All of their requests are to be padding. None if such a step can't be timed.

        Args:
            nodes: of each tree.
            narrow: whether the step drafts from the learned vocabulary.
        """
        return None

    def tell_requests_apart(self, num_reqs: int, nodes: int) -> None:
        """Let the padding of a replay of `step_graphs` draft as different requests do."""

    def treat_requests_alike(self) -> None:
        """Undo `tell_requests_apart`."""

    @property
    def all_plans(self) -> list[TreePlan]:
        """Return the full-vocabulary plans, then the plans of the learned vocabulary."""
        return [*self.plans.values(), *self.narrow_plans.values()]

    def runner(self, plan: TreePlan) -> DraftGraphRunner | None:
        """The runner that captures and replays a plan's growth; None while memory is profiled."""
        return getattr(self, plan.runner_name, None)

    def draft_graphs(self) -> list[Any]:
        """Every captured graph of growing."""
        runners = [self.runner(plan) for plan in self.all_plans]
        return [graph for runner in runners if runner for graph in runner.graphs.values()]

    def capture(self) -> None:
        """Capture the first pass, then the growth of a tree as one graph per shape and batch."""
        from vllm_graft.graph_runners.language.draft import one_capture_stream

        before = taken(self.device)
        with self.clock.part("draft_graphs"), one_capture_stream(self.device):
            self.capture_first_pass()
            self.capture_growths()
        self.graph_bytes = taken(self.device) - before
        self.clock.log()

    def capture_growths(self) -> None:
        """Capture the graphs that `plan_growth_graphs` planned."""
        # All requests are padding: the captured run writes to no tree and reads no cache.
        self.idx_mapping.fill_(-1)
        for plan in self.all_plans:
            plan.growth.clear_prefix()
            runner = self.runner(plan)
            assert runner is not None
            runner.capture_levels(functools.partial(self._capture_growth, plan))

    def _capture_growth(self, plan: TreePlan, num_reqs: int) -> None:
        plan.growth.map_block_tables(self)
        metadata = plan.growth.metadata(num_reqs, self.max_model_len)
        self.grow_and_choose(plan, num_reqs, metadata)

    # --- a step -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft a tree for each request.

        Returns:
            Draft tokens int64 ``[num_reqs, num_nodes]``, best cumulative score first. The topology
            stays in the context's `TreeState`. The engine keeps the first of these drafts.
        """
        input_batch = self.first_pass(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
            num_sampled, num_rejected, *args, dummy_run=dummy_run,
            skip_attn_for_dummy_run=skip_attn_for_dummy_run,
            samples=num_speculative_tokens != 0, **kwargs,
        )  # fmt: skip
        if num_speculative_tokens == 0:
            return self.draft_tokens[: input_batch.num_reqs].fill_(-1)
        if self.head.learned is not None and not dummy_run:
            self.head.learned.step()
        plan = self._plan_of(num_speculative_tokens or self.num_nodes, input_batch.num_reqs)
        if not dummy_run:
            nodes = input_batch.num_reqs * self.num_candidates(plan)
            self.context.counters.nodes_drafted += nodes
        self.draft_tree(
            plan,
            input_batch,
            num_rejected,
            live=not dummy_run,
            skip_attn=dummy_run and skip_attn_for_dummy_run,
            need_eager=kwargs.get("is_profile", False),
            dp_sync_state=kwargs.get("dp_sync_state"),
        )
        if self.ngrams is not None and not dummy_run:
            self.ngrams.end_step()
        drafts = self.draft_tokens[: input_batch.num_reqs]
        if not dummy_run and is_asked_for():
            nodes = plan.shape.num_nodes
            slots = self.idx_mapping[: input_batch.num_reqs].long()
            check_trees(self.context.tree, slots, drafts[:, :nodes])
            self.context.counters.rank_checks += 1
        return drafts

    def first_level(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The root's best children: log-probabilities and tokens, ``[num_reqs, topk]`` each."""
        return self.first_logp[:num_reqs], self.first_tokens[:num_reqs]

    def draft_first_level(
        self, num_reqs: int, *, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The root's best children, where the first pass has drafted them; see `Drafter`."""
        return self.first_level(num_reqs)

    def noise(
        self, num_reqs: int, positions: torch.Tensor, *, rows: int, offset: int
    ) -> Noise | None:
        """The noise that the target will draw with; see `Drafter.noise`."""
        if not self.config.coupled:
            return None
        return Noise(
            self.temperature,
            self.seeds,
            self.idx_mapping[:num_reqs],
            positions,
            rows,
            offset,
            self.use_fp64_gumbel,
        )

    def _plan(self, num_nodes: int) -> TreePlan:
        """The smallest plan with at least `num_nodes`: its first nodes are the best such tree."""
        return self.plans[min(nodes for nodes in self.plans if nodes >= num_nodes)]

    def _plan_of(self, num_nodes: int, num_reqs: int) -> TreePlan:
        """The plan of a step, which may be one of the learned vocabulary."""
        plan, learned = self._plan(num_nodes), self.head.learned
        nodes = plan.shape.num_nodes
        narrows = learned is not None and learned.narrows(nodes, num_reqs)
        return self.narrow_plans[nodes] if narrows else plan

    def draft_tree(
        self,
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
        num_reqs, width, growth = batch.num_reqs, self.graph_rows(plan), plan.growth
        runner = self.runner(plan)
        growth.set_prefix(batch.seq_lens, num_rejected)
        num_rows = num_reqs * width
        if dp_sync_state is not None:
            # The dummy batch of a rank without requests is as large as the graph, padding included;
            # since vLLM 0.33 the ranks agree on the most requests that any of them has.
            num_reqs = min(num_reqs, dp_sync_state.num_reqs)
            dp_sync_state, num_rows = self._build_uniform_batch_dp_sync(
                dp_sync_state, num_reqs, num_query_per_req=width
            )
        desc, sync = dispatch_cg_and_sync_dp(
            runner,
            num_reqs,
            num_rows,
            uniform_token_count=width,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=need_eager,
            dp_sync_state=dp_sync_state,
        )
        if not skip_attn:
            growth.map_block_tables(self)
        # Data-parallel ranks have agreed on a number of rows, padding included.
        num_reqs_padded = desc.num_tokens // width

        def launch() -> None:
            max_seq_len = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
            if desc.cg_mode == CUDAGraphMode.FULL:
                # The graph's bound: another length splits keys, and rounds, differently.
                max_seq_len = self.max_model_len
            metadata = None if skip_attn else growth.metadata(num_reqs_padded, max_seq_len)
            across_dp = None if sync is None else sync.num_tokens_across_dp
            self.grow_and_choose(plan, num_reqs_padded, metadata, across_dp)

        if desc.cg_mode != CUDAGraphMode.FULL:
            if live:
                captured = runner is not None and bool(runner.graphs)
                self.context.counters.count_launch("no_fit" if captured else "uncaptured")
            launch()
            return
        assert runner is not None
        if live:
            self.context.counters.draft_replays += 1
            runner.replay(desc, launch, functools.partial(self._drafted, plan, num_reqs))
        else:
            runner.run_fullgraph(desc)

    def grow_and_choose(
        self,
        plan: TreePlan,
        num_reqs: int,
        metadata: list[Any] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
    ) -> None:
        """Grow the candidates of a plan and keep the best as the trees. Capturable."""
        growth, num_nodes = plan.growth, plan.shape.num_nodes
        levels = growth.grow(
            self,
            num_reqs,
            metadata,
            num_tokens_across_dp,
            num_nodes=num_nodes,
            narrow=plan.narrow,
        )
        first = num_candidates(growth.candidates.topk, levels)
        num_extra = 0
        for extra in self.extras:
            extra.add(
                growth.candidates,
                self,
                num_reqs,
                levels,
                first=first + num_extra,
                num_nodes=num_nodes,
            )
            num_extra += extra.columns(num_nodes)
        finish_tree(
            growth.candidates,
            num_reqs,
            levels,
            num_nodes,
            self.idx_mapping[:num_reqs],
            self.context.tree,
            self.draft_tokens,
            num_extra=num_extra,
            extra_nodes=self.context.extra_nodes if num_extra else None,
        )

    def _drafted(self, plan: TreePlan, num_reqs: int) -> list[torch.Tensor]:
        """Copies of a batch's drafts and of their topology."""
        slots, nodes = self.idx_mapping[:num_reqs].long(), plan.shape.num_nodes
        tree = self.context.tree
        return [
            self.draft_tokens[:num_reqs, :nodes].clone(),
            *(each[slots] for each in (tree.parents, tree.depths, tree.masks)),
        ]
