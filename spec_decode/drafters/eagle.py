"""Trees of drafts that continue from the target's states, one pass per level: EAGLE (Li et al.,
arXiv 2401.15077, 2503.01840), MTP (arXiv 2412.19437), and the assistants of Gemma 4."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.options import flag
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
        # A compiled draft does not check the dtypes of its inputs: they must be those of vLLM's own
        # pass.
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
    """What vLLM builds in the place of `EagleSpeculator`; it adds how the draft is loaded."""


class MtpTrees(TargetDependentTrees, MTPSpeculator):
    """What vLLM builds in the place of `MTPSpeculator`, which drafts with a single module. The
    module was trained to predict the token after the next one. Each level of a tree runs it again,
    over the states that its last run has left, as each step of vLLM's chain does."""

    seams = ("mtp",)


class Gemma4Trees(TargetDependentTrees, Gemma4Speculator):
    """What vLLM builds in the place of `Gemma4Speculator`. The assistant's layers have queries
    alone, and read K/V of the target's last layers. It drafts all tokens from the position of the
    last accepted one. So a node differs from its siblings by its token and by the state of its
    parent, and a level leaves no K/V for the levels below it."""

    seams = ("gemma4",)
    has_window = False

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the assistant, and let its layers read those of the target, as vLLM does. Raises
        `ConfigError` if it would draft chains on a CPU. The target's layers stay vLLM's there,
        whose K/V lie otherwise than a draft of ours reads them."""
        model: nn.Module = super().load_draft_model(target_model, target_attn_layer_names)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        backends = {layers[name].get_attn_backend().get_name() for name in target_attn_layer_names}
        if self.trees.shape.topk == 1 and "CPU_ATTN" in backends:
            raise ConfigError(
                f"{flag('tree', 'topk')} is 1, but the attention backend CPU_ATTN keeps K/V of a "
                "chain's target as Gemma 4's assistant can't read them: set it to 2 or more"
            )
        return model
