"""How a drafter of trees is built: its configuration, its draft, and what it allocates."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_graft.base import info
from vllm_graft.base.decision import decline_or_raise
from vllm_graft.base.errors import ConfigError, HookError
from vllm_graft.base.metric import Numbers
from vllm_graft.base.options import flag
from vllm_graft.hooks import manager
from vllm_graft.seams import compose
from vllm_graft.seams.kept_memory import kept_memory
from vllm_graft.spec_decode.config.tree_config import TreeConfig
from vllm_graft.spec_decode.drafters.tree_plan import TreePlan
from vllm_graft.spec_decode.heads.combine import quantize_by_kernel
from vllm_graft.spec_decode.heads.draft_tokens import check_draft_tokens
from vllm_graft.spec_decode.heads.head import DraftHead
from vllm_graft.spec_decode.kernels.attention.workspace import AttentionWorkspace
from vllm_graft.spec_decode.lookup.ngrams import Ngrams
from vllm_graft.spec_decode.lookup.unread_predictions import UnreadPredictions
from vllm_graft.spec_decode.startup.begin import begin
from vllm_graft.spec_decode.startup.clock import StartClock
from vllm_graft.spec_decode.targets.families import ServedLayers
from vllm_graft.spec_decode.targets.model_state import TreeModelState
from vllm_graft.spec_decode.trees.shape import num_candidates
from vllm_graft.spec_decode.tuning.plan import bounds, plan_shapes
from vllm_graft.spec_decode.tuning.scheduling import tree_policy
from vllm_graft.spec_decode.verification.context import TreeContext

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_graft.graph_runners.language.draft import DraftGraphRunner
    from vllm_graft.spec_decode.attention.choice import KernelChoice
    from vllm_graft.spec_decode.config.ngram_config import NgramConfig
    from vllm_graft.spec_decode.drafters.base import Extra, Growth
    from vllm_graft.spec_decode.trees.shape import TreeShape


class TreeLoading(DraftModelSpeculator):
    """Loads a draft, and allocates what drafting trees takes; `TreeDrafting` does the rest.

    Loading the draft and sharing embeddings and output head stay vLLM's own.
    """

    num_speculative_steps: int
    """VLLM's name for the number of drafts per request."""

    grafts_draft: bool = True
    """Whether the draft's own attention layers run over trees, too."""

    grows_by_levels: bool = False
    """Whether the drafter is a `LevelTrees`: its drafting can be rehearsed before it is loaded."""

    has_window: bool = False
    """Whether the draft's passes may read a window of the text (``graft.tree.draft_window``)."""

    grows_from_block: bool = False
    """Whether the drafter is a `BlockTrees` that can be rehearsed likewise."""

    extras: tuple[Extra, ...] = ()
    """Other sources of candidates."""

    ngrams: Ngrams | None = None
    """The one among them that reads the requests' texts; None unless it was asked for."""

    unread: UnreadPredictions | None = None
    """Counts predictions where no n-grams are looked for in them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        config = TreeConfig.from_vllm(vllm_config)
        assert config is not None
        if config.draft_window is not None and not self.has_window:
            raise ConfigError(
                f"{flag('tree', 'draft_window')} is {config.draft_window}, but "
                f"{type(self).__name__} has no draft whose passes read a window: drop the key"
            )
        self.config, self.engine_config = config, vllm_config
        super().__init__(self.stock_config(), device)
        self.graph_runner_cls: type[DraftGraphRunner] = manager.resolve(
            "graft_draft_graph_runners", self.config.graph_runner, "tree", "graph_runner"
        )
        self.batches = self.plan_batches()
        self.shape = bounds(self.batches)
        self.plans: dict[int, TreePlan] = {}
        self.narrow_plans: dict[int, TreePlan] = {}
        self.graph_bytes = 0
        self.attention_choices: list[KernelChoice] = []
        self.clock = StartClock()
        self.ahead = begin(self)

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """What `graft_info()` says about this part."""

    @abstractmethod
    def numbers(self) -> Numbers:
        """The numbers of this part's metrics."""

    @property
    def num_nodes(self) -> int:
        """The largest number of nodes that the engine asks for."""
        speculative = self.engine_config.speculative_config
        assert speculative is not None
        nodes: int = speculative.num_speculative_tokens
        return nodes

    # --- what a drafter says of its draft model ---------------------------------------------------

    def stock_config(self) -> VllmConfig:
        """The configuration that vLLM's own speculator is built with: the engine's."""
        return self.engine_config

    def plan_batches(self) -> dict[TreeShape, list[int]]:
        """The shapes of the trees, each with the numbers of requests that it is drafted for."""
        policy = tree_policy(self.config, self.engine_config.speculative_config)
        return plan_shapes(policy, self.config, self.engine_config)

    @abstractmethod
    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, Growth]:
        """What grows the trees of each shape.

        Args:
            shapes: shapes of the trees.
            layers: the draft's attention layers by name.
        """

    @property
    @abstractmethod
    def growth_bytes(self) -> int:
        """Device bytes that the growths of all shapes take."""

    # --- loading ----------------------------------------------------------------------------------

    def load_model(self, target_model: nn.Module) -> None:
        """Load the draft, then graft the tree parts onto target and draft.

        Raises:
            ConfigError: if a layer of target or draft computes attention that a tree can't use.
        """
        super().load_model(target_model)
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        drafts = sorted(self.draft_attn_layer_names)
        kinds = (Attention, MLAAttention) if self.grafts_draft else (Attention,)
        if unknown := [name for name in drafts if not isinstance(layers[name], kinds)]:
            raise ConfigError(
                f"--additional-config.graft.tree needs a draft whose layers are plain attention "
                f"{'or MLA' if self.grafts_draft else 'alone'}, but {unknown[0]} is a "
                f"{type(layers[unknown[0]]).__name__}: remove the graft.tree keys to draft chains"
            )
        served = ServedLayers(
            layers, drafts, chain=self.shape.topk == 1, draft_too=self.grafts_draft
        )
        if self.device.type == "cuda":
            quantize_by_kernel(self.model)
        # vLLM's sleep mode may drop what is allocated where weights are.
        with kept_memory(self.engine_config):
            self.head = self._make_head()
            self.allocate_context(served.attending)
            self.allocate_growths(served.attending)
            served.attach(self.context)
        compose.compose(target_model, self.engine_config, TreeModelState.bind(self.context, served))
        info.publish("tree", info.weakly(self.report), info.weakly(self.numbers))

    def _make_head(self) -> DraftHead:
        """The draft's output head; without FP8 or hot tokens that a preset wants in vain."""
        vocab_size = self.vllm_config.model_config.get_vocab_size()
        check_draft_tokens(self.model, vocab_size, self.draft_model_config.model)
        make = functools.partial(DraftHead, self.model, self.shape.topk, vocab_size=vocab_size)
        fp8, hot = self.config.head_dtype == "fp8", self.config.hot_tokens
        # What a preset adds is not what somebody asked for.
        if fp8:
            try:
                return make(hot, fp8=True)
            except ConfigError as refused:
                decline_or_raise("tree.head_dtype", refused, self.engine_config)
        try:
            return make(hot)
        except ConfigError as refused:
            if hot is None:
                raise
            decline_or_raise("tree.hot_tokens", refused, self.engine_config)
            return make()

    def allocate_context(self, layers: Mapping[str, Any]) -> None:
        """Allocate what the tree parts of this worker share.

        Args:
            layers: the attention layers that trees run over, by name.
        """
        shape, device = self.shape, self.device
        workspace = AttentionWorkspace.allocate(
            self.max_num_reqs,
            max(shape.num_nodes + 1, shape.topk),
            # A chain of a draft whose layers stay as they are has none.
            max((layer.num_heads for layer in layers.values()), default=1),
            max((layer.head_size for layer in layers.values()), default=1),
            max_splits=64,
            device=device,
        )
        self.context = TreeContext.allocate(
            shape, self.max_num_reqs, self.max_num_tokens, workspace, device
        )
        self.context.draft_window = self.config.draft_window or 0
        self.context.recurrent_form = self.config.recurrent_form

    def allocate_growths(self, layers: Mapping[str, Any]) -> None:
        """Allocate what drafts the trees; `head` and `context` are there."""
        shape, device = self.shape, self.device
        first = (self.max_num_reqs, shape.topk)
        self.first_logp = torch.zeros(first, dtype=torch.float32, device=device)
        self.first_tokens = torch.zeros(first, dtype=torch.int64, device=device)
        if (ngram := self.ngram_config) is not None:
            self._add_ngrams(self.make_ngrams(ngram))
        if self.ngrams is None or not self.ngrams.state.reference:
            self.unread = UnreadPredictions()
            self.context.watches = (*self.context.watches, self.unread)
        drafts = sorted(self.draft_attn_layer_names)
        draft_layers = {name: layers[name] for name in drafts if self.grafts_draft}
        growths = self.make_growths(self.batches, draft_layers)
        self._require_columns(growths)
        self.plans = {
            tree.num_nodes: TreePlan(tree, batches, growths[tree])
            for tree, batches in self.batches.items()
        }
        if (learned := self.head.learned) is not None:
            self.context.emitted = learned.emitted
            if not self.config.learn_salted:
                self.context.teaches = learned.keep_apart(self.max_num_reqs)
            self.context.watches = (*self.context.watches, learned)
            self.narrow_plans = {
                nodes: dataclasses.replace(plan, narrow=True) for nodes, plan in self.plans.items()
            }

    @property
    def ngram_config(self) -> NgramConfig | None:
        """Which n-grams join the drafts; None for none."""
        return self.config.ngram

    def make_ngrams(self, config: NgramConfig) -> Ngrams:
        """What reads the requests' texts for n-grams."""
        return Ngrams(
            config,
            self.max_num_reqs,
            self.max_model_len,
            self.vllm_config.model_config.get_vocab_size(),
            self.device,
            reference=config.room(self.max_model_len),
        )

    def _add_ngrams(self, ngrams: Ngrams) -> None:
        self.ngrams = ngrams
        self.extras = (*self.extras, ngrams)
        context = self.context
        context.watches = (*context.watches, ngrams)
        context.extra_nodes, context.extra_counts = ngrams.nodes, ngrams.counts

    @property
    def extra_columns(self) -> int:
        """Columns behind its levels that a table of candidates needs for `extras`."""
        return sum(extra.columns(self.shape.num_nodes) for extra in self.extras)

    def _require_columns(self, growths: Mapping[TreeShape, Growth]) -> None:
        for growth in growths.values():
            table = growth.candidates
            levels = num_candidates(table.topk, table.steps)
            if table.scores.shape[1] < levels + self.extra_columns:
                raise HookError(
                    f"{flag('tree', 'ngram')} needs {self.extra_columns} more columns in the table "
                    f"of candidates than {type(growth).__name__} has: allocate it with "
                    "extra=drafter.extra_columns, or drop the key"
                )
