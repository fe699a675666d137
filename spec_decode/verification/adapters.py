"""Adapters (LoRA) of the target's output head, for every row that a request samples.

In its forward pass vLLM gives a request's adapter to all rows of the request, whatever their order,
so a tree's nodes have it as a chain's drafts do. Its output head is told one adapter per request,
while a request that verifies drafts has a row of logits for the root and for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_graft.seams.wrap import wrap

if TYPE_CHECKING:
    from vllm_graft.spec_decode.verification.context import TreeContext

    Inputs = tuple[tuple[int, ...], tuple[int, ...], set[Any]]
    """Adapters by row of logits and by row of the batch, and the requests for them."""


def adapt_sampled_rows(worker: Any) -> None:
    """Let a worker of vLLM's, which has loaded its model, adapt each row of logits of a tree."""
    runner = worker.model_runner
    context: TreeContext = runner.speculator.context

    def then_repeat(original: Callable[..., Inputs]) -> Callable[..., Inputs]:
        def make_lora_inputs(req_ids: list[str], *args: Any) -> Inputs:
            of_requests, of_tokens, used = original(req_ids, *args)
            # vLLM calls this behind the model state's preprocessing, which begins the step.
            assert context.step is not None
            starts = context.step.batch.cu_num_logits_np[: len(of_requests) + 1]
            of_rows = np.repeat(np.asarray(of_requests), np.diff(starts))
            return tuple(of_rows.tolist()), of_tokens, used

        return make_lora_inputs

    wrap(runner.lora_state, "make_lora_inputs", then_repeat)
