"""Trees of drafts that come from one pass over a block of positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_graft.graph_runners.language.widths import plan_widths, request_counts
from vllm_graft.seams.compare import require_seams
from vllm_graft.spec_decode.drafters.accepted_rows import AcceptedRows, AcceptedRowsTrees
from vllm_graft.spec_decode.drafters.block.block_growth import BlockGrowth
from vllm_graft.spec_decode.drafters.block.chain_config import chain_config
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.trees.shape import TreeShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.spec_decode.drafters.block.lattice import Lattice
    from vllm_graft.spec_decode.drafters.tree_plan import TreePlan


class BlockTrees(AcceptedRowsTrees, DFlashSpeculator):
    """Mixed into one of vLLM's `DFlashSpeculator` classes.

    vLLM's own step stays as it is: it projects the target's states to the draft's K/V, then runs
    the draft once over the last token and the masks behind it. Where a chain samples from what that
    pass leaves, a tree is grown from it, inside the graph that vLLM captures of the step. The
    draft's layers know of no tree: their K/V is made of the accepted rows, in a chain's order.
    """

    grafts_draft = False

    lattice: Lattice | None = None
    """What the block pass has left, while a tree is grown from it."""

    _aux_staging: torch.Tensor | None
    """Since vLLM 0.33: where its graph finds the target's states, to combine them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        require_seams("block")
        super().__init__(vllm_config, device)
        self.draft_tokens: torch.Tensor = torch.zeros(
            self.max_num_reqs, self.num_nodes, dtype=torch.int64, device=device
        )
        # Dummy batches have the request-state indices of real ones.
        self._live = torch.zeros(1, dtype=torch.bool, device=device)
        self._was_launched = False
        # The states are combined before their rows are moved, outside of the graph.
        self._aux_staging = None

    # --- shapes -----------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """Positions of the block that predict a token: the deepest level of a tree."""
        return min(self.config.steps, self.num_nodes)

    def stock_config(self) -> VllmConfig:
        """The engine's configuration, with the depth for a number of tokens."""
        return chain_config(self.engine_config, self.depth)

    def plan_batches(self) -> dict[TreeShape, list[int]]:
        """The largest tree for all batches: the engine keeps its first nodes, the best ones."""
        most, nodes = self.engine_config.scheduler_config.max_num_seqs, self.num_nodes
        topk = min(self.config.topk, nodes)
        return {TreeShape(topk, self.depth, nodes): list(range(1, most + 1))}

    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, BlockGrowth]:
        """A growth for the one shape; none of the draft's layers takes part in it."""
        self.accepted = AcceptedRows(self.input_buffers, self.hidden_states)
        self.growths = {
            shape: BlockGrowth(shape, self.max_num_reqs, self.device, extra=self.extra_columns)
            for shape in shapes
        }
        return self.growths

    @property
    def growth_bytes(self) -> int:
        return sum(growth.num_bytes for growth in self.growths.values())

    # --- graphs -----------------------------------------------------------------------------------

    def plan_growth_graphs(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Plan the numbers of requests of the step's graphs, which are vLLM's and hold the tree."""
        graphs, width = self.query_cudagraph_manager, self.num_query_per_req
        assert graphs is not None
        rows = self.engine_config.compilation_config.max_cudagraph_capture_size or 0
        counts = request_counts(min(self.max_num_reqs, rows // width))
        plan_widths(graphs, {width: counts})

    def capture_first_pass(self) -> None:
        """Capture vLLM's step; all of its requests are padding."""
        self._live.zero_()
        super(TreeDrafting, self).capture()

    def capture_growths(self) -> None:
        """Do nothing: the step's graphs hold the growth."""

    def draft_graphs(self) -> list[Any]:
        """Every captured graph of a step."""
        graphs = self.query_cudagraph_manager
        return [] if graphs is None else list(graphs.graphs.values())

    def step_graphs(self, nodes: int) -> list[tuple[CudaGraphManager | None, int]] | None:
        """The one graph of a step, whatever the number of nodes."""
        self._live.zero_()
        return [(self.query_cudagraph_manager, self.num_query_per_req)]

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # The rows of a verified tree, of which the accepted ones come first.
        most: int = self.max_num_tokens
        return min(num_reqs * (self.num_nodes + 1), most)

    # --- a step -----------------------------------------------------------------------------------

    def first_pass(self, *args: Any, dummy_run: bool, samples: bool, **kwargs: Any) -> InputBatch:
        """Run vLLM's whole step over the accepted rows; it drafts by `_generate_draft`."""
        self._live.fill_(not dummy_run)
        self._was_launched = False
        batch = super().first_pass(*args, dummy_run=dummy_run, samples=samples, **kwargs)
        if samples and not dummy_run:
            self._count_step()
        return batch

    def _count_step(self) -> None:
        counters = self.context.counters
        if self._was_launched:
            counters.count_launch("no_fit" if self.draft_graphs() else "uncaptured")
        else:
            counters.draft_replays += 1

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Run the block, and grow a tree from it where a chain is sampled. Capturable."""
        self._was_launched = True
        states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        rows = num_reqs * self.depth
        slots = self.sample_idx_mapping[: rows : self.depth]
        self.idx_mapping[:num_reqs].copy_(torch.where(self._live, slots, -1))
        self.lattice = self.make_lattice(num_reqs, states[self.sample_indices[:rows]])
        try:
            self.grow_and_choose(self.plans[self.num_nodes], num_reqs, None, num_tokens_across_dp)
        finally:
            self.lattice = None

    def make_lattice(self, num_reqs: int, states: torch.Tensor) -> Lattice:
        """What the block says of every depth. Capturable.

        Args:
            num_reqs: requests, padding included.
            states: ``[num_reqs * depth, hidden]``, the draft's output at the predicting positions.
        """
        raise NotImplementedError

    def draft_tree(self, plan: TreePlan, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first pass has drafted the tree."""

    def draws(self, num_reqs: int) -> torch.Tensor:
        """Positions by which the target's draws are keyed, int64 ``[num_reqs, depth]``."""
        positions = self.sample_pos[: num_reqs * self.depth]
        return positions.view(num_reqs, self.depth) - 1
