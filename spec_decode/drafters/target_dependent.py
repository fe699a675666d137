"""Trees of drafts that continue from the target's states, one pass per level: EAGLE and MTP."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_graft.spec_decode.drafters.draft_trees import TreePlan
from vllm_graft.spec_decode.drafters.levels import (
    LevelGrowth,
    LevelMemory,
    frontier_context,
    growths_by_levels,
)
from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting
from vllm_graft.spec_decode.trees.tree import TreeShape
from vllm_graft.spec_decode.verification.context import AcceptedRows


class TargetDependentTrees(TreeDrafting):
    """Mixed into one of vLLM's speculators that draft from the target's states. What they share
    comes from a base of theirs that vLLM has renamed before: it is not named here. The first pass
    is vLLM's own extend pass over the rows that the target has accepted. It leaves the root's state
    instead of one token, and `LevelGrowth` drafts all levels from there."""

    has_window = True
    # VLLM's.
    advance_draft_positions: bool
    prefill_cudagraph_manager: CudaGraphManager | None
    on_multi_step_decode_begin: Callable[[int], None]
    on_multi_step_decode_end: Callable[[int], None]

    def make_growths(
        self, shapes: Collection[TreeShape], layers: Mapping[str, AttentionLayerBase]
    ) -> Mapping[TreeShape, LevelGrowth]:
        # The states go to where vLLM's extend pass reads them.
        self.accepted = AcceptedRows(self.input_buffers, self.hidden_states)
        self.memory = LevelMemory(
            shapes,
            layers,
            max_reqs=self.max_num_reqs,
            dtype=self.dtype,
            device=self.device,
            extra=self.extra_columns,
        )
        # A compiled draft does not check the dtypes of its inputs: they must be those of vLLM's.
        token_dtype = self.input_buffers.input_ids.dtype
        one_position = not self.advance_draft_positions
        return growths_by_levels(
            shapes,
            lambda shape: LevelGrowth(shape, self.memory, token_dtype, one_position=one_position),
        )

    # --- graphs -----------------------------------------------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        # The chain's decode loop does not run, so its graphs must not be captured.
        self.decode_cudagraph_manager = None

    def capture_first_pass(self) -> None:
        steps, self.num_speculative_steps = self.num_speculative_steps, 1
        try:
            # With one step vLLM captures the extend pass alone.
            super(TreeDrafting, self).capture()
        finally:
            self.num_speculative_steps = steps

    def first_pass_graph(self, width: int) -> tuple[CudaGraphManager | None, int]:
        """Graphs of vLLM's extend pass, which has as many rows as the target's."""
        return self.prefill_cudagraph_manager, width

    def tell_requests_apart(self, num_reqs: int, nodes: int) -> None:
        """Also give each row a state of its own, in the place of the target's."""
        super().tell_requests_apart(num_reqs, nodes)
        # The same ones in each rank.
        drawn = torch.Generator(self.hidden_states.device).manual_seed(0)
        self.hidden_states[: num_reqs * (nodes + 1)].normal_(generator=drawn)

    # --- a step -----------------------------------------------------------------------------------

    def grow_and_choose(self, plan: TreePlan, num_reqs: int, *args: Any) -> None:
        # vLLM's hooks around the steps after a chain's first one: a draft may attend otherwise in
        # them. They fire in launches and in captures alike, so that a graph holds what they set.
        self.on_multi_step_decode_begin(num_reqs)
        super().grow_and_choose(plan, num_reqs, *args)
        self.on_multi_step_decode_end(num_reqs)

    @property
    def last_states(self) -> torch.Tensor:
        """``[>= num_reqs, hidden]``; the extend pass leaves them at the front of its rows."""
        return self.hidden_states

    def run_frontier(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        metadata: Any,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = positions.shape[0]
        embeds = self.model.embed_input_ids(tokens) if self.supports_mm_inputs else None
        self._prepare_eplb_forward(rows)
        with frontier_context(self.vllm_config, rows, metadata, num_tokens_across_dp):
            output = self.model(
                input_ids=tokens, positions=positions, hidden_states=states, inputs_embeds=embeds
            )
        return output if isinstance(output, tuple) else (output, output)


class EagleTrees(TargetDependentTrees, EagleSpeculator):
    """Trees from EAGLE heads (Li et al., arXiv 2401.15077 and 2503.01840): what vLLM builds in the
    place of `EagleSpeculator`, which adds how the draft is loaded."""
