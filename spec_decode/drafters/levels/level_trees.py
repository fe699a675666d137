"""What drafters with one pass of a draft model per level share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import BatchDescriptor, set_forward_context

from vllm_graft.spec_decode.drafters.tree_drafting import TreeDrafting

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_graft.spec_decode.drafters.levels.level_memory import LevelMemory


class LevelTrees(TreeDrafting):
    """Trees of a draft model that vLLM runs over one token after another, with a pass per level.

    Attributes:
        memory: what the levels of all shapes share; the drafter makes it with its growths.
    """

    memory: LevelMemory

    @property
    def growth_bytes(self) -> int:
        return self.memory.num_bytes

    @property
    def last_positions(self) -> torch.Tensor:
        """int64 ``[>= num_reqs]``; the first pass leaves them at the front of its rows."""
        positions: torch.Tensor = self.input_buffers.positions
        return positions

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Choose the root's best children, where a chain samples its first token.

        Args:
            hidden_states: ``[num_reqs, hidden]``, the first pass's output at the last token.
            sample_src_positions: int64 ``[num_reqs]``, position of the last token.
            args: other sampling state of the chain, not used: drafts are chosen, not sampled.
            kwargs: more of that state, not used either.

        Returns:
            The best child of each root, int64 ``[num_reqs]``.
        """
        num_reqs = hidden_states.shape[0]
        noise = self.noise(num_reqs, sample_src_positions, rows=1, offset=0)
        _, tokens = self.head.top(hidden_states, out=self.first_level(num_reqs), noise=noise)
        return tokens[:, 0]


def frontier_context(
    vllm_config: VllmConfig, rows: int, metadata: Any, num_tokens_across_dp: torch.Tensor | None
) -> AbstractContextManager[Any]:
    """The forward context in which a draft runs over a frontier; see `Drafter.run_frontier`."""
    context: AbstractContextManager[Any] = set_forward_context(
        metadata,
        vllm_config,
        num_tokens=rows,
        num_tokens_across_dp=num_tokens_across_dp,
        # No slots: the tree's K/V goes to the scratch, the paged cache is only read.
        slot_mapping={},
        batch_descriptor=BatchDescriptor(num_tokens=rows),
    )
    return context
