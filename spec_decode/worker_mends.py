"""Mends of vLLM's worker, once it has loaded its model, that drafts of ours need."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_graft.seams.wrap import around

if TYPE_CHECKING:
    from vllm_graft.spec_decode.verification.context import TreeContext

    Rows = dict[str, Any]
    """``LogprobsTensors`` by request, each with a row for every token but the first."""

    Inputs = tuple[tuple[int, ...], tuple[int, ...], set[Any]]
    """Adapters by row of logits and by row of the batch, and the requests for them."""


def cut_prompt_logprobs(worker: Any) -> None:
    """Cut what a worker says of prompts to their length.

    Beside requests that run already, vLLM 0.32 schedules a waiting one that has a single token left
    to compute with placeholders for drafts. If that token is its whole prompt, vLLM takes the
    placeholders for tokens of the prompt too: `prompt_logprobs` has a row for each, with the token
    ids that the last request left in the slot."""
    of_prompts = worker.model_runner.prompt_logprobs_worker
    if of_prompts is None:
        return  # Ranks that don't sample have none.

    @around(of_prompts, "compute_prompt_logprobs")
    def compute(
        original: Callable[..., Rows], logits_fn: Any, hidden_states: Any, input_batch: Any,
        all_token_ids: Any, num_computed_tokens: Any, prompt_lens: np.ndarray,
    ) -> Rows:  # fmt: skip
        found = original(
            logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        )
        return cut(found, input_batch, prompt_lens) if found else found


def cut(found: Rows, batch: Any, prompt_lens: np.ndarray) -> Rows:
    """Leave out rows behind the ends of prompts, and prompts without any. `found` is what vLLM
    computed in a step, of prompts that end in it; `prompt_lens` is int32 ``[max_num_reqs]`` by
    request-state slot."""
    kept = dict(found)
    for index, name in enumerate(batch.req_ids):
        if name not in found:
            continue
        length = int(prompt_lens[batch.idx_mapping_np[index]])
        computed = int(batch.num_computed_prefill_tokens_np[index])
        if computed + int(batch.num_scheduled_tokens[index]) > length:
            rows, count = found[name], length - 1 - computed
            names = ("logprob_token_ids", "logprobs", "selected_token_ranks")
            kept[name] = rows._replace(**{each: getattr(rows, each)[:count] for each in names})
    return {name: rows for name, rows in kept.items() if len(rows.logprobs)}


def adapt_sampled_rows(worker: Any) -> None:
    """Let a worker adapt (LoRA) each row of logits of a tree. In its forward pass vLLM gives a
    request's adapter to all of its rows. Its output head is told one adapter per request, while a
    tree has a row of logits for the root and for each node."""
    runner = worker.model_runner
    context: TreeContext = runner.speculator.context

    @around(runner.lora_state, "make_lora_inputs")
    def make(original: Callable[..., Inputs], req_ids: list[str], *args: Any) -> Inputs:
        of_requests, of_tokens, used = original(req_ids, *args)
        # vLLM calls this behind the model state's preprocessing, which begins the step.
        assert context.step is not None
        starts = context.step.batch.cu_num_logits_np[: len(of_requests) + 1]
        of_rows = np.repeat(np.asarray(of_requests), np.diff(starts))
        return tuple(of_rows.tolist()), of_tokens, used


def follow_weights(worker: Any) -> None:
    """Let a worker renew copies of a draft's output head whenever weights were replaced. A draft
    that shares the target's head gets the new one from vLLM. Drafts by copies of the old one's rows
    would be accepted less often. The worker's speculator may be another's, without such a head."""
    head = getattr(worker.model_runner.speculator, "head", None)
    renew: Callable[[], None] | None = getattr(head, "renew", None)
    if renew is None:
        return

    # A trainer that sends weights goes past the model runner.
    @around(worker.model_runner, "reload_weights")
    @around(worker, "finish_weight_update")
    def then_renew(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        renew()
        return result
