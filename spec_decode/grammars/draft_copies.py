"""The worker's copies of drafts for the scheduler, which then carry their parents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graft.seams.wrap import wrap
from vllm_graft.spec_decode.grammars.packed_drafts import pack

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.input_batch import InputBatch

    from vllm_graft.spec_decode.trees.topology import TreeState


def send_parents(worker: Any) -> None:
    """Let the drafts of a worker of vLLM's, which has loaded its model, carry their parents.

    vLLM copies drafts to the host only in steps with structured output, and so do we.
    """
    context = worker.model_runner.speculator.context
    # Chains need no parents: vLLM's own way is right for them.
    if context.shape.topk > 1:
        tree: TreeState = context.tree

        def then_pack(original: Callable[..., None]) -> Callable[..., None]:
            def set_draft_tokens(input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
                if input_batch.has_structured_output_reqs:
                    nodes = slice(1, 1 + draft_tokens.shape[1])
                    parents = tree.parents[input_batch.idx_mapping, nodes]
                    draft_tokens = pack(draft_tokens, parents)
                original(input_batch, draft_tokens)

            return set_draft_tokens

        wrap(worker.model_runner.draft_tokens_handler, "set_draft_tokens", then_pack)
