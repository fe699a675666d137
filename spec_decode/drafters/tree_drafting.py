"""Drafting trees (EAGLE-2, Li et al. 2024, arXiv 2406.16858), for any speculator of vLLM's."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_graft.base import info
from vllm_graft.base.decision import decline_or_raise
from vllm_graft.base.errors import ConfigError
from vllm_graft.base.metric import Numbers
from vllm_graft.base.options import flag
from vllm_graft.graph_runners.language.draft import DraftGraphRunner
from vllm_graft.seams.kept_memory import kept_memory
from vllm_graft.seams.permission import require_seams
from vllm_graft.seams.wrap import compose
from vllm_graft.spec_decode.config.tree_config import NgramConfig, TreeConfig
from vllm_graft.spec_decode.drafters import draft_trees
from vllm_graft.spec_decode.drafters.base import Growth
from vllm_graft.spec_decode.drafters.draft_trees import (
    DraftTrees,
    TreePlan,
    become_stock,
    count,
    describe,
    taken,
)
from vllm_graft.spec_decode.drafters.levels import LevelMemory
from vllm_graft.spec_decode.heads.fp8_head import quantize_by_kernel
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.heads.hot_tokens import check_draft_tokens
from vllm_graft.spec_decode.kernels.candidates import finish_tree
from vllm_graft.spec_decode.kernels.topk import Noise
from vllm_graft.spec_decode.lookup.ngrams import Ngrams
from vllm_graft.spec_decode.startup.rehearsal import begin
from vllm_graft.spec_decode.targets.families import ServedLayers
from vllm_graft.spec_decode.targets.model_state import TreeModelState
from vllm_graft.spec_decode.trees.tree import TreeShape, check_trees
from vllm_graft.spec_decode.tuning.attention_timing import choose_target_kernels
from vllm_graft.spec_decode.tuning.scheduling import bounds, plan_shapes, tree_policy
from vllm_graft.spec_decode.verification.context import AcceptedRows, TreeContext


class TreeDrafting(DraftModelSpeculator):
    """Drafts a tree where the speculator that it is mixed into drafts a chain.

    A subclass puts it before one of vLLM's speculators and says how the draft model runs: it
    defines `make_growths`, `capture_first_pass`, `first_pass_graph` and the members of `Drafter`
    that are missing here. Loading the draft and sharing embeddings and output head stay vLLM's own.

    Attributes:
        trees: everything of ours that the drafter holds, but for the memory of its own kind.
        accepted: memory for the rows that the target has accepted, made with the growths.
        memory: what the levels of all shapes share, likewise.
        seams: parts of the ledger that the drafter needs besides those of all trees.
        grafts_draft: whether the draft's own attention layers run over trees, too.
        grows_by_levels: whether a pass grows each level, which can be rehearsed before loading.
        grows_from_block: whether the drafter is a `BlockTrees` that can be rehearsed likewise.
        has_window: whether the draft's passes may read a window (``graft.tree.draft_window``).
    """

    accepted: AcceptedRows
    memory: LevelMemory
    num_speculative_steps: int  # VLLM's name for the number of drafts per request.

    seams: tuple[str, ...] = ()
    grafts_draft: bool = True
    grows_by_levels: bool = True
    grows_from_block: bool = False
    has_window: bool = False

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        require_seams(*self.seams)
        config = TreeConfig.from_vllm(vllm_config)
        assert config is not None
        if config.draft_window is not None and not self.has_window:
            raise ConfigError(
                f"{flag('tree', 'draft_window')} is {config.draft_window}, but "
                f"{type(self).__name__} has no draft whose passes read a window: drop the key"
            )
        self.trees = DraftTrees(config, vllm_config)
        super().__init__(self.stock_config(), device)
        self.trees.batches = self.plan_batches()
        self.trees.shape = bounds(self.trees.batches)
        self.trees.ahead = begin(self)

    @property
    def config(self) -> TreeConfig:
        return self.trees.config

    @property
    def context(self) -> TreeContext:
        return self.trees.context

    @property
    def head(self) -> DraftHead:
        return self.trees.head

    def report(self) -> dict[str, Any]:
        return describe(self)

    def numbers(self) -> Numbers:
        return count(self)

    # --- what a drafter says of its draft model ---------------------------------------------------

    def stock_config(self) -> VllmConfig:
        return self.trees.engine_config

    def plan_batches(self) -> Mapping[TreeShape, list[int]]:
        """The shapes of the trees, each with the numbers of requests that it is drafted for."""
        engine = self.trees.engine_config
        return plan_shapes(tree_policy(self.config, engine.speculative_config), self.config, engine)

    @abstractmethod
    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, Growth]:
        """What grows the trees of each shape; `layers` are the draft's attention layers by name."""

    @property
    def growth_bytes(self) -> int:
        """Device bytes that the growths of all shapes take."""
        return self.memory.num_bytes

    def make_head(self) -> DraftHead:
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        check_draft_tokens(self.model, vocab_size, self.draft_model_config.model)
        trees = self.trees
        return DraftHead.asked(
            self.model, trees.shape.topk, vocab_size, trees.config, trees.engine_config
        )

    @property
    def ngram_config(self) -> NgramConfig | None:
        return self.config.ngram

    def make_ngrams(self, config: NgramConfig, **options: Any) -> Ngrams:
        return Ngrams(
            config, self.max_num_reqs, self.max_model_len,
            self.vllm_config.model_config.get_vocab_size(), self.device,
            reference=config.room(self.max_model_len), memory=self.config.memory, **options,
        )  # fmt: skip

    @property
    def extra_columns(self) -> int:
        """Columns behind its levels that a table of candidates needs for other sources."""
        return self.trees.sources.columns(self.trees.shape.num_nodes)

    # --- loading ----------------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then graft the tree parts onto target and draft. Raises `ConfigError` if
        a layer of target or draft computes attention that a tree can't use, and no preset asked for
        trees; else vLLM's own speculator drafts."""
        super().load_model(target_model)
        engine = self.trees.engine_config
        try:
            served = self._serve_layers()
        except ConfigError as refused:
            decline_or_raise("tree", refused, engine)
            become_stock(self, str(refused))
            return
        if self.device.type == "cuda":
            quantize_by_kernel(self.model)
        # vLLM's sleep mode may drop what is allocated where weights are.
        with kept_memory(engine):
            self.trees.head = self.make_head()
            self.allocate_context(served.attending)
            self.allocate_growths(served.attending)
            served.attach(self.context)
        compose(target_model, engine, TreeModelState.bind(self.context, served))
        info.publish("tree", info.weakly(self.report), info.weakly(self.numbers))

    def _serve_layers(self) -> ServedLayers:
        """Find who serves the layers of target and draft, or raise a ConfigError."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        drafts = sorted(self.draft_attn_layer_names)
        kinds = (Attention, MLAAttention) if self.grafts_draft else (Attention,)
        if unknown := [name for name in drafts if not isinstance(layers[name], kinds)]:
            raise ConfigError(
                f"--additional-config.graft.tree needs a draft whose layers are plain attention "
                f"{'or MLA' if self.grafts_draft else 'alone'}, but {unknown[0]} is a "
                f"{type(layers[unknown[0]]).__name__}: remove the graft.tree keys to draft chains"
            )
        chain = self.trees.shape.topk == 1
        return ServedLayers(layers, drafts, chain=chain, draft_too=self.grafts_draft)

    def allocate_context(self, layers: Mapping[str, Any]) -> None:
        self.trees.allocate_context(layers, self.max_num_reqs, self.max_num_tokens, self.device)

    def allocate_growths(self, layers: Mapping[str, Any]) -> None:
        ngram = self.ngram_config
        ngrams = None if ngram is None else self.make_ngrams(ngram)
        self.trees.sources.attach(self.context, ngrams)
        drafts = sorted(self.draft_attn_layer_names)
        draft_layers = {name: layers[name] for name in drafts if self.grafts_draft}
        self.trees.set_growths(self.make_growths(self.trees.batches, draft_layers))

    # --- graphs -----------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan the graphs of the first pass, which are vLLM's own, and those of growing."""
        super().init_cudagraph_manager(cudagraph_mode)
        trees = self.trees
        with trees.clock.part("wait"):
            trees.ahead.finish()
        if not trees.attention_choices and trees.shape.topk > 1:
            # vLLM has no K/V cache yet, so there is memory to measure in, which is given back.
            with trees.clock.part("attention"):
                trees.attention_choices = choose_target_kernels(
                    trees.engine_config,
                    self.config,
                    self.draft_attn_layer_names,
                    self.context.workspace,
                    self.device,
                )
        self.plan_growth_graphs(cudagraph_mode)

    def plan_growth_graphs(self, cudagraph_mode: CUDAGraphMode) -> None:
        draft_trees.plan_graphs(self, cudagraph_mode)

    def graph_rows(self, plan: TreePlan) -> int:
        """Rows per request in the graphs of a growth: those of a level."""
        return plan.shape.topk

    def num_candidates(self, plan: TreePlan) -> int:
        """Nodes that are scored for a request."""
        return plan.shape.num_candidates

    def first_pass_graph(self, width: int) -> tuple[CudaGraphManager | None, int]:
        """Graphs of the first pass for `width` rows of the target per request, and its own rows."""
        raise NotImplementedError

    def step_graphs(
        self, nodes: int, *, narrow: bool = False
    ) -> list[tuple[CudaGraphManager | None, int]] | None:
        """The graphs that a step of so many nodes replays over padding, and their rows per request.
        With `narrow` it drafts from the learned vocabulary. None if such a step can't be timed."""
        graphs = [self.first_pass_graph(nodes + 1)]
        if nodes:
            plans = self.trees.narrow_plans if narrow else self.trees.plans
            if nodes not in plans:
                return None
            plan = plans[nodes]
            graphs.append((self.runner(plan), plan.shape.topk))
            plan.growth.clear_prefix()
        return graphs

    def tell_requests_apart(self, num_reqs: int, nodes: int) -> None:
        """Make each request of a replay over padding end at a row of its own, as real ones do. vLLM
        captures with all of them ending at row 0, so that they would all draft the same tree."""
        self.treat_requests_alike()
        if self.trees.roots.states is not None:  # Else no first pass ends at rows.
            _, rows = self.first_pass_graph(nodes + 1)
            ends = self.last_token_indices[:num_reqs]
            ends.copy_(torch.arange(1, num_reqs + 1, device=ends.device) * rows - 1)

    def treat_requests_alike(self) -> None:
        """Undo `tell_requests_apart`: a shorter pass has no such rows."""
        if self.trees.roots.states is not None:
            self.last_token_indices.zero_()

    def runner(self, plan: TreePlan) -> DraftGraphRunner | None:
        """The runner that captures and replays a plan's growth; None while memory is profiled."""
        return getattr(self, plan.runner_name, None)

    def draft_graphs(self) -> list[Any]:
        runners = [self.runner(plan) for plan in self.trees.all_plans]
        return [graph for runner in runners if runner for graph in runner.graphs.values()]

    def capture(self) -> None:
        """Capture the first pass, then the growth of a tree as one graph per shape and batch."""
        from vllm_graft.graph_runners.language.draft import one_capture_stream

        trees, before = self.trees, taken(self.device)
        with trees.clock.part("draft_graphs"), one_capture_stream(self.device):
            self.capture_first_pass()
            self.capture_growths()
        trees.graph_bytes = taken(self.device) - before
        trees.clock.log()

    @abstractmethod
    def capture_first_pass(self) -> None:
        """Capture the graphs of `first_pass`."""

    def capture_growths(self) -> None:
        draft_trees.capture_graphs(self)

    # --- a step -----------------------------------------------------------------------------------

    def propose(
        self, input_batch: InputBatch, attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor], last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None, num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any, dummy_run: bool = False, skip_attn_for_dummy_run: bool = False,
        num_speculative_tokens: int | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Draft a tree for each request. Returns draft tokens int64 ``[num_reqs, num_nodes]``, best
        cumulative score first. The topology stays in the context's `TreeState`."""
        input_batch = self.first_pass(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states,
            num_sampled, num_rejected, *args, dummy_run=dummy_run,
            skip_attn_for_dummy_run=skip_attn_for_dummy_run,
            samples=num_speculative_tokens != 0, **kwargs,
        )  # fmt: skip
        ngrams = None if dummy_run else self.trees.sources.ngrams
        if ngrams is not None:
            ngrams.remember(input_batch, drafts=num_speculative_tokens != 0)
        if num_speculative_tokens == 0:
            # vLLM writes -1 over drafts that it has not asked for.
            return self.draft_tokens[: input_batch.num_reqs]
        if self.head.learned is not None and not dummy_run:
            self.head.learned.step()
        plan = self.trees.plan_of_step(
            num_speculative_tokens or self.trees.num_nodes, input_batch.num_reqs
        )
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
        if ngrams is not None:
            ngrams.end_step()
        drafts = self.draft_tokens[: input_batch.num_reqs]
        if not dummy_run and self.trees.compares_ranks:
            nodes = plan.shape.num_nodes
            slots = self.idx_mapping[: input_batch.num_reqs].long()
            check_trees(self.context.tree, slots, drafts[:, :nodes])
            self.context.counters.rank_checks += 1
        return drafts

    def first_pass(
        self, input_batch: InputBatch, attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor], last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None, num_sampled: torch.Tensor,
        num_rejected: torch.Tensor, *args: Any, dummy_run: bool, samples: bool, **kwargs: Any,
    ) -> InputBatch:  # fmt: skip
        """Run the draft over the accepted rows, and leave what `draft_first_level` needs. By
        default it is vLLM's own propose, as for a chain of one token. `samples` says whether
        anybody will read the first level. Returns the batch whose rows the pass ran over."""
        hidden = last_hidden_states
        if aux_hidden_states:
            hidden = self.model.combine_hidden_states(torch.cat(aux_hidden_states, -1))
        if not dummy_run:
            input_batch, hidden = self.accepted.move(
                self.context, input_batch, hidden, self.max_num_reqs
            )
        # `propose` has called this method; this is vLLM's own behind it.
        super().propose(
            input_batch, attn_metadata, slot_mappings, hidden, None, num_sampled, num_rejected,
            *args, dummy_run=dummy_run,
            # For one token vLLM runs no further pass; for none, 0.33 leaves the head out too.
            num_speculative_tokens=int(samples), **kwargs,
        )  # fmt: skip
        return input_batch

    def first_level(self, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.trees.roots.children(num_reqs)

    @property
    def last_positions(self) -> torch.Tensor:
        """int64 ``[>= num_reqs]``; the first pass leaves them at the front of its rows."""
        positions: torch.Tensor = self.input_buffers.positions
        return positions

    def sample_draft(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Keep what the root's children are drafted from, where a chain samples its first token.
        The tree's own graph drafts them, so that they may come from the learned vocabulary, and so
        that a step without drafts does without the head. The sampling state of the chain in `args`
        is not used. vLLM puts what is returned to where the tree's tokens will be."""
        return self.trees.roots.keep(hidden_states)

    def draft_first_level(
        self, num_reqs: int, *, narrow: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.noise(num_reqs, self.last_positions[:num_reqs], rows=1, offset=1)
        return self.trees.roots.draft(self.head, num_reqs, noise, narrow=narrow)

    def noise(
        self, num_reqs: int, positions: torch.Tensor, *, rows: int, offset: int
    ) -> Noise | None:
        if not self.config.coupled:
            return None
        return Noise(
            self.temperature, self.seeds, self.idx_mapping[:num_reqs], positions, rows, offset,
            self.use_fp64_gumbel,
        )  # fmt: skip

    def draft_tree(
        self, plan: TreePlan, batch: InputBatch, num_rejected: torch.Tensor, **step: Any
    ) -> None:
        draft_trees.launch_growth(self, plan, batch, num_rejected, **step)

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
            self, num_reqs, metadata, num_tokens_across_dp, num_nodes=num_nodes, narrow=plan.narrow
        )
        num_extra = self.trees.sources.add(growth.candidates, self, num_reqs, levels, num_nodes)
        finish_tree(
            growth.candidates, num_reqs, levels, num_nodes, self.idx_mapping[:num_reqs],
            self.context.tree, self.draft_tokens, num_extra=num_extra,
            extra_nodes=self.context.extra_nodes if num_extra else None,
            of_memory=self.trees.sources.of_memory,
        )  # fmt: skip
