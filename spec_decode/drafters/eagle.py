"""The EAGLE proposer that drafts a dynamic tree (EAGLE-2, Li et al. 2024, arXiv 2406.16858)."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft.base import info
from vllm_graft.base.errors import ConfigError
from vllm_graft.config import GraftConfig
from vllm_graft.hooks import manager
from vllm_graft.seams import compose as model_state
from vllm_graft.spec_decode.attention.attention_timing import target_ways
from vllm_graft.spec_decode.attention.layer import graft_attention
from vllm_graft.spec_decode.drafters.draft_report import describe, taken
from vllm_graft.spec_decode.drafters.levels import DraftLevels, LevelMemory, Metadata
from vllm_graft.spec_decode.heads.combine import quantize_by_kernel
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.kernels.attention.tree_attention import AttentionWorkspace
from vllm_graft.spec_decode.kernels.gather import TokenRows, follow_path
from vllm_graft.spec_decode.kernels.topk import Noise
from vllm_graft.spec_decode.targets.model_state import TreeModelState
from vllm_graft.spec_decode.tuning.plan import TreePlan, bounds, plan_shapes
from vllm_graft.spec_decode.tuning.scheduling import graph_counts, tree_policy
from vllm_graft.spec_decode.verification.context import TreeContext

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.dp_utils import DPSyncState
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.graph_runners.language.draft import DraftGraphRunner
    from vllm_graft.spec_decode.attention.choice import WayChoice


class TreeEagleSpeculator(EagleSpeculator):
    """Drafts a tree where vLLM's EAGLE speculator drafts a chain.

    The draft's extend pass, its graphs, the loading of the draft and the sharing of embeddings
    and output head are vLLM's own: the extend pass yields the first level instead of one token,
    and `DraftLevels` runs the levels below it.
    """

    num_speculative_steps: int
    """vLLM's name for the number of drafts a request: here the nodes of a tree."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        graft = GraftConfig.from_vllm(vllm_config)
        assert graft is not None
        assert graft.eagle is not None
        self.config = graft.eagle
        self.graph_runner_cls: type[DraftGraphRunner] = manager.resolve(
            "graft_draft_graph_runners", self.config.graph_runner, "eagle", "graph_runner"
        )
        self.batches = plan_shapes(tree_policy(self.config), self.config, vllm_config)
        self.shape = bounds(self.batches)
        self.plans: dict[int, TreePlan] = {}
        self.narrow_plans: dict[int, TreePlan] = {}
        self.graph_bytes = 0
        self.attention_choices: list[WayChoice] = []

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then graft the tree parts onto target and draft.

        Raises:
            ConfigError: a layer of target or draft computes attention that a tree can't use.
        """
        target = frozenset(get_layers_from_vllm_config(self.vllm_config, Attention))
        super().load_model(target_model)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        if unknown := sorted(self.draft_attn_layer_names - set(layers)):
            raise ConfigError(
                f"--additional-config.graft.eagle needs a draft of plain attention layers, but "
                f"{unknown[0]} is another kind: remove the graft.eagle keys to draft chains"
            )
        if self.device.type == "cuda":
            quantize_by_kernel(self.model)
        self.head = DraftHead(
            self.model,
            self.shape.topk,
            self.config.hot_tokens,
            self.vllm_config.model_config.get_vocab_size(),
            fp8=self.config.head_dtype == "fp8",
        )
        self._allocate(layers)
        for name, layer in layers.items():
            graft_attention(name, layer, self.context, is_draft=name in self.draft_attn_layer_names)
        model_state.compose(
            target_model, self.vllm_config, TreeModelState.bind(self.context, target)
        )
        info.publish("eagle", info.weakly(self.report))

    def _allocate(self, layers: dict[str, Attention]) -> None:
        shape, device = self.shape, self.device
        workspace = AttentionWorkspace.allocate(
            self.max_num_reqs,
            max(shape.num_nodes + 1, shape.topk),
            max(layer.num_heads for layer in layers.values()),
            max(layer.head_size for layer in layers.values()),
            max_splits=64,
            device=device,
        )
        self.context = TreeContext.allocate(
            shape, self.max_num_reqs, self.max_num_tokens, workspace, device
        )
        # Accepted paths in a chain's order; states go where vLLM's extend pass reads them.
        buffers = self.input_buffers
        self.path_rows = TokenRows(
            torch.zeros_like(buffers.input_ids),
            torch.zeros_like(buffers.positions),
            self.hidden_states,
        )
        first = (self.max_num_reqs, shape.topk)
        self.first_logp = torch.zeros(first, dtype=torch.float32, device=device)
        self.first_tokens = torch.zeros(first, dtype=torch.int64, device=device)
        draft_layers = {name: layers[name] for name in sorted(self.draft_attn_layer_names)}
        self.memory = LevelMemory(
            self.batches,
            draft_layers,
            max_reqs=self.max_num_reqs,
            dtype=self.dtype,
            device=device,
        )
        levels: dict[tuple[int, int], DraftLevels] = {}
        for tree, batches in self.batches.items():
            grown = levels.get((tree.topk, tree.steps)) or DraftLevels(
                # A compiled draft takes its inputs' dtypes for granted: those of vLLM's own pass.
                tree,
                self.memory,
                self.input_buffers.input_ids.dtype,
            )
            levels[tree.topk, tree.steps] = grown
            self.plans[tree.num_nodes] = TreePlan(tree, batches, grown)
        if self.head.learned is not None:
            self.context.emitted = self.head.learned.emitted
            self.narrow_plans = {
                nodes: dataclasses.replace(plan, narrow=True) for nodes, plan in self.plans.items()
            }

    def report(self) -> dict[str, Any]:
        """What `graft_info()` says of this part."""
        return describe(self)

    # --- graphs ---------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Prepare the extend pass's graphs (vLLM's own) and those of the tree levels."""
        super().init_cudagraph_manager(cudagraph_mode)
        if not self.attention_choices:
            # Before vLLM has a K/V cache: there is memory to measure in, and it is given back.
            self.attention_choices = target_ways(
                self.vllm_config,
                self.config,
                self.draft_attn_layer_names,
                self.context.workspace,
                self.device,
            )
        # The chain's decode loop does not run, so its graphs must not be captured.
        self.decode_cudagraph_manager = None
        auto = self.config.tree == "auto"
        counts = graph_counts(self.vllm_config) if auto else {}
        for plan in self.all_plans:
            runner = self.graph_runner_cls(
                self.vllm_config, self.device, cudagraph_mode, plan.shape.topk
            )
            if auto:
                runner.plan_counts(counts.get(plan.shape.num_nodes + 1, []))
            else:
                runner.keep_sizes(plan.batches)
            # An attribute each: so vLLM's memory profiling finds and drops them.
            setattr(self, plan.runner_name, runner)

    @property
    def all_plans(self) -> list[TreePlan]:
        """Those of the draft's own vocabulary, then those of the learned one, if there is one."""
        return [*self.plans.values(), *self.narrow_plans.values()]

    def runner(self, plan: TreePlan) -> DraftGraphRunner | None:
        """What captures and replays a plan's levels; None while memory is profiled."""
        return getattr(self, plan.runner_name, None)

    def draft_graphs(self) -> list[Any]:
        """Every captured graph of the levels."""
        runners = [self.runner(plan) for plan in self.all_plans]
        return [graph for runner in runners if runner for graph in runner.graphs.values()]

    def capture(self) -> None:
        """Capture the extend pass, then all levels of a tree as one graph a shape and batch."""
        from vllm_graft.graph_runners.language.draft import one_capture_stream

        before = taken(self.device)
        with one_capture_stream(self.device):
            self._capture()
        self.graph_bytes = taken(self.device) - before

    def _capture(self) -> None:
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            # With one step vLLM captures the extend pass alone.
            super().capture()
        finally:
            self.num_speculative_steps = steps
        # As padding: the captured run writes to no request's tree and reads no cache.
        self.idx_mapping.fill_(-1)
        for plan in self.all_plans:
            plan.levels.prefix_lens.zero_()
            runner = self.runner(plan)
            assert runner is not None
            runner.capture_levels(functools.partial(self._capture_levels, plan))

    def _capture_levels(self, plan: TreePlan, num_reqs: int) -> None:
        plan.levels.map_block_tables(self)
        metadata = plan.levels.metadata(num_reqs, self.max_model_len)
        self._run_levels(plan, num_reqs, metadata)

    def _run_levels(
        self,
        plan: TreePlan,
        num_reqs: int,
        metadata: list[Metadata] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
    ) -> None:
        """Grow trees of a plan from what `sample_draft` left. Capturable."""
        plan.levels.seed(self.first_logp[:num_reqs], self.first_tokens[:num_reqs])
        plan.levels.run(
            self,
            num_reqs,
            metadata,
            num_tokens_across_dp,
            num_nodes=plan.shape.num_nodes,
            narrow=plan.narrow,
        )

    # --- a step ---------------------------------------------------------------------------------

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
        """Draft a tree a request.

        Returns:
            Draft tokens int64 ``[num_reqs, num_nodes]`` in the order of their cumulative scores;
            the topology stays in the context's `TreeState`. The engine keeps a prefix.
        """
        hidden = last_hidden_states
        if aux_hidden_states:
            hidden = self.model.combine_hidden_states(torch.cat(aux_hidden_states, -1))
        if not dummy_run:
            input_batch, hidden = self._follow_path(input_batch, hidden)
        super().propose(
            input_batch, attn_metadata, slot_mappings, hidden, None, num_sampled, num_rejected,
            *args, dummy_run=dummy_run, skip_attn_for_dummy_run=skip_attn_for_dummy_run,
            # The extend pass alone.
            num_speculative_tokens=1, **kwargs,
        )  # fmt: skip
        if num_speculative_tokens == 0:
            return self.draft_tokens[: input_batch.num_reqs].fill_(-1)
        if self.head.learned is not None and not dummy_run:
            self.head.learned.step()
        plan = self._plan(num_speculative_tokens or self.num_speculative_steps)
        if not dummy_run:
            nodes = input_batch.num_reqs * plan.shape.num_candidates
            self.context.counters.nodes_drafted += nodes
        self._grow(
            plan,
            input_batch,
            num_rejected,
            live=not dummy_run,
            skip_attn=dummy_run and skip_attn_for_dummy_run,
            need_eager=kwargs.get("is_profile", False),
            dp_sync_state=kwargs.get("dp_sync_state"),
        )
        return self.draft_tokens[: input_batch.num_reqs]

    def _follow_path(
        self, batch: InputBatch, hidden: torch.Tensor
    ) -> tuple[InputBatch, torch.Tensor]:
        """Bring the rows of accepted paths to the front, where a chain would have had them."""
        step = self.context.step
        if step is None or step.num_sampled is None or not batch.num_draft_tokens:
            return batch, hidden
        num_tokens = batch.num_tokens_after_padding
        follow_path(
            self.context.path,
            step.num_sampled,
            batch.query_start_loc,
            step.num_drafts,
            TokenRows(batch.input_ids, batch.positions, hidden),
            self.path_rows,
            num_reqs=batch.num_reqs,
            num_tokens=num_tokens,
            max_reqs=self.max_num_reqs,
        )
        moved = copy.copy(batch)
        moved.input_ids = self.path_rows.ids[:num_tokens]
        moved.positions = self.path_rows.positions[:num_tokens]
        # vLLM copies these onto themselves, which is no work.
        return moved, self.path_rows.states[:num_tokens]

    def noise(
        self, num_reqs: int, positions: torch.Tensor, *, rows: int, offset: int
    ) -> Noise | None:
        """What the target will draw with, `offset` behind `positions` ``[num_reqs * rows]``."""
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

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Take the root's best children where the chain takes its first token.

        Args:
            hidden_states: ``[num_reqs, hidden]``, the extend pass's output at the last token.
            sample_src_positions: int64 ``[num_reqs]``, position of the last token.
            args: other sampling state of the chain, not used: drafts are chosen, not sampled.
            kwargs: likewise.
        """
        rows = slice(0, hidden_states.shape[0])
        # For the levels' graph, which of the shapes' it will be.
        out = self.first_logp[rows], self.first_tokens[rows]
        noise = self.noise(hidden_states.shape[0], sample_src_positions, rows=1, offset=0)
        _, tokens = self.head.top(hidden_states, out=out, noise=noise)
        return tokens[:, 0]

    def _plan(self, num_nodes: int) -> TreePlan:
        """The smallest plan that has `num_nodes`: a prefix of its nodes is the best such tree."""
        plans = self.narrow_plans if self.head.narrows else self.plans
        return plans[min(nodes for nodes in plans if nodes >= num_nodes)]

    def _grow(
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
        """Run the levels below the first, by graph where one was captured."""
        num_reqs, topk, levels = batch.num_reqs, plan.shape.topk, plan.levels
        runner = self.runner(plan)
        levels.set_prefix(batch.seq_lens, num_rejected)
        num_rows = num_reqs * topk
        if dp_sync_state is not None:
            dp_sync_state, num_rows = self._build_uniform_batch_dp_sync(
                dp_sync_state, num_reqs, num_query_per_req=topk
            )
        desc, sync = dispatch_cg_and_sync_dp(
            runner,
            num_reqs,
            num_rows,
            uniform_token_count=topk,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=need_eager,
            dp_sync_state=dp_sync_state,
        )
        if not skip_attn:
            levels.map_block_tables(self)
        # Data-parallel ranks agreed on a number of rows, padding included.
        num_reqs_padded = desc.num_tokens // topk

        def launch() -> None:
            max_seq_len = int(batch.seq_lens_cpu_upper_bound[:num_reqs].max())
            if desc.cg_mode == CUDAGraphMode.FULL:
                # Beside a graph its bound: another would split keys, and so round, otherwise.
                max_seq_len = self.max_model_len
            metadata = None if skip_attn else levels.metadata(num_reqs_padded, max_seq_len)
            across_dp = None if sync is None else sync.num_tokens_across_dp
            self._run_levels(plan, num_reqs_padded, metadata, across_dp)

        if desc.cg_mode != CUDAGraphMode.FULL:
            launch()
            return
        assert runner is not None
        if live:
            runner.replay(desc, launch, functools.partial(self._drafted, plan, num_reqs))
        else:
            runner.run_fullgraph(desc)

    def _drafted(self, plan: TreePlan, num_reqs: int) -> list[torch.Tensor]:
        """Copies of the trees of a batch."""
        slots, nodes = self.idx_mapping[:num_reqs].long(), plan.shape.num_nodes
        tree = self.context.tree
        return [
            self.draft_tokens[:num_reqs, :nodes].clone(),
            *(each[slots] for each in (tree.parents, tree.depths, tree.masks)),
        ]
