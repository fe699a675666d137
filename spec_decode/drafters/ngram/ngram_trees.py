"""Trees of n-grams alone (``method: ngram``): no draft model takes part."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

from vllm_graft.spec_decode.config.tree_config import NgramConfig, lengths_of
from vllm_graft.spec_decode.drafters.base import PasslessGrowth
from vllm_graft.spec_decode.drafters.draft_trees import TreePlan
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.kernels.batch_slots import keep_slots
from vllm_graft.spec_decode.lookup.ngrams import Ngrams
from vllm_graft.spec_decode.trees.tree import TreeShape

UNMATCHED = -1e30
"""Score of the nodes that fill a tree up; any node of a match ranks before them."""


class NoModel(nn.Module):
    """Stands where vLLM keeps a drafter's model; it has no weights."""


class NoHead:
    """Stands where a drafter keeps its output head; see `DraftHead`."""

    learned = fp8 = target_ids = None


class RepeatGrowth(PasslessGrowth):
    """A `Growth` that guesses nothing: it fills up a tree that has too few matches. Its nodes are a
    chain of the last token, as in vLLM's own n-gram drafts. The table has a column per level, and
    the matches stand in the columns behind them."""

    def __init__(
        self, shape: TreeShape, max_reqs: int, device: torch.device, *, extra: int
    ) -> None:
        nodes = shape.num_nodes
        super().__init__(TreeShape(1, nodes, nodes), max_reqs, device, extra=extra)
        self.shape = shape
        self.candidates.scores[:, :nodes] = UNMATCHED
        self.candidates.parents[:, :nodes] = torch.arange(-1, nodes - 1, device=device)

    def grow(
        self, drafter: Any, num_reqs: int, *passes: Any, num_nodes: int, narrow: bool = False
    ) -> int:
        nodes = self.shape.num_nodes
        last = drafter.last_tokens[:num_reqs, None]
        self.candidates.tokens[:num_reqs, :nodes].copy_(last.expand(-1, nodes))
        return nodes


class NgramTrees(TreeDrafting, NgramGPUSpeculator):
    """What vLLM builds in the place of `NgramGPUSpeculator`. The best ``topk`` earlier occurrences
    of the end of a request's text are paths of up to ``steps`` tokens, which are one as far as
    their tokens are equal. In `load_model` the target's layers come to verify trees."""

    seams = ("ngram",)
    grafts_draft = grows_by_levels = False

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, req_states: Any = None
    ) -> None:
        super().__init__(vllm_config, device)
        self.last_tokens = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)

    def allocate_context(self, layers: Mapping[str, Any]) -> None:
        super().allocate_context(layers)
        self.context.coupled = False

    # --- no draft model ---------------------------------------------------------------------------

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> Any:
        return NoModel()

    def make_head(self) -> Any:
        return NoHead()

    @property
    def ngram_config(self) -> NgramConfig:
        return lengths_of(self.config, self.speculative_config)

    def make_ngrams(self, config: NgramConfig, **options: Any) -> Ngrams:
        shape = self.trees.shape
        return super().make_ngrams(config, matches=shape.topk, depth=shape.steps, **options)

    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, RepeatGrowth]:
        self.growths = {
            shape: RepeatGrowth(shape, self.max_num_reqs, self.device, extra=self.extra_columns)
            for shape in shapes
        }
        return self.growths

    @property
    def growth_bytes(self) -> int:
        return sum(growth.num_bytes for growth in self.growths.values())

    def num_candidates(self, plan: TreePlan) -> int:
        """Nodes of all matches, with those that are one."""
        return self.trees.sources.columns(plan.shape.num_nodes)

    # --- graphs -----------------------------------------------------------------------------------

    def graph_rows(self, plan: TreePlan) -> int:
        """A program per request finds its matches."""
        return 1

    def capture_first_pass(self) -> None:
        """Do nothing: no model runs."""

    def step_graphs(
        self, nodes: int, *, narrow: bool = False
    ) -> list[tuple[CudaGraphManager | None, int]] | None:
        if not nodes:
            return []
        plans = self.trees.plans
        return [(self.runner(plans[nodes]), 1)] if nodes in plans else None

    # --- a step -----------------------------------------------------------------------------------

    def first_pass(
        self, input_batch: InputBatch, *args: Any, dummy_run: bool, samples: bool, **kwargs: Any
    ) -> InputBatch:
        if not samples:
            # Nothing is drafted: such a step launches nothing that one without drafts has not.
            return input_batch
        return self._note(input_batch, *args, dummy_run=dummy_run, **kwargs)

    def _note(
        self, input_batch: InputBatch, attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor], last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None, num_sampled: torch.Tensor,
        num_rejected: torch.Tensor, last_sampled: torch.Tensor,
        *args: Any, dummy_run: bool, **kwargs: Any,
    ) -> InputBatch:  # fmt: skip
        if dummy_run:
            self.idx_mapping.fill_(-1)
        else:
            # Not vLLM's copies: six launches, of which a draft without draws needs no temperature
            # and no seed. A small target's steps are as long as the host's work.
            ngrams = self.trees.sources.ngrams
            assert ngrams is not None
            keep_slots(
                input_batch.idx_mapping, last_sampled, self.idx_mapping, self.last_tokens,
                input_batch.num_reqs, ngrams.learned,
            )  # fmt: skip
        return input_batch
