"""The rows that the target has accepted, in the order in which a chain would have them."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from vllm_graft.spec_decode.kernels.compact import TokenRows, follow_path

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

    from vllm_graft.spec_decode.verification.context import TreeContext


class AcceptedRows:
    """Memory for a batch's rows behind a move of each accepted path to the front of its request.

    It takes sizes and dtypes of the draft's buffers. `states` is ``[max_num_tokens, hidden]``,
    where the draft reads the target's states.
    """

    def __init__(self, buffers: InputBuffers, states: torch.Tensor) -> None:
        ids, positions = map(torch.zeros_like, (buffers.input_ids, buffers.positions))
        self.rows = TokenRows(ids, positions, states)

    def move(
        self, context: TreeContext, batch: InputBatch, hidden: torch.Tensor, max_reqs: int
    ) -> tuple[InputBatch, torch.Tensor]:
        """Move the rows of accepted paths to the front, where a chain would have them.

        `hidden`, ``[num_tokens, hidden]``, are the target's states of the rows of `batch`, which it
        has verified; `max_reqs` is the same in each call. Returns the batch with ids and positions
        in that order, and the states; what was given if no request had drafts.
        """
        step = context.step
        if step is None or step.num_sampled is None or not batch.num_draft_tokens:
            return batch, hidden
        num_tokens = batch.num_tokens_after_padding
        follow_path(
            context.path,
            step.num_sampled,
            batch.query_start_loc,
            step.num_drafts,
            TokenRows(batch.input_ids, batch.positions, hidden),
            self.rows,
            num_reqs=batch.num_reqs,
            num_tokens=num_tokens,
            max_reqs=max_reqs,
        )
        moved = copy.copy(batch)
        moved.input_ids = self.rows.ids[:num_tokens]
        moved.positions = self.rows.positions[:num_tokens]
        # vLLM's propose copies these states onto themselves, which costs nothing.
        return moved, self.rows.states[:num_tokens]
