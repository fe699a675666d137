"""Logprobs of a prompt, without rows for the drafts behind it.

Beside requests that run already, vLLM 0.32 schedules a waiting one that has a single token left to
compute with placeholders for drafts. If that token is its whole prompt, vLLM takes the placeholders
for tokens of the prompt too: `prompt_logprobs` has a row for each, with the token ids that the last
request left in the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_graft.seams.wrap import wrap

if TYPE_CHECKING:
    import numpy as np

    Rows = dict[str, Any]
    """``LogprobsTensors`` by request, each with a row for every token but the first."""


def mend(worker: Any) -> None:
    """Cut what a worker of vLLM's, which has loaded its model, says of prompts to their length."""
    of_prompts = worker.model_runner.prompt_logprobs_worker
    # Ranks that don't sample have none.
    if of_prompts is not None:
        wrap(of_prompts, "compute_prompt_logprobs", _then_cut)


def cut(found: Rows, batch: Any, prompt_lens: np.ndarray) -> Rows:
    """Leave out rows behind the ends of prompts, and prompts without a row.

    `found` is what vLLM computed in a step, of prompts that end in it; `prompt_lens` is int32
    ``[max_num_reqs]`` by request-state slot.
    """
    kept = dict(found)
    for index, name in enumerate(batch.req_ids):
        if name not in found:
            continue
        length = int(prompt_lens[batch.idx_mapping_np[index]])
        computed = int(batch.num_computed_prefill_tokens_np[index])
        if computed + int(batch.num_scheduled_tokens[index]) > length:
            kept[name] = _first(found[name], length - 1 - computed)
    return {name: rows for name, rows in kept.items() if len(rows.logprobs)}


def _then_cut(original: Callable[..., Rows]) -> Callable[..., Rows]:
    def compute_prompt_logprobs(
        logits_fn: Any,
        hidden_states: Any,
        input_batch: Any,
        all_token_ids: Any,
        num_computed_tokens: Any,
        prompt_lens: np.ndarray,
    ) -> Rows:
        found = original(
            logits_fn, hidden_states, input_batch, all_token_ids, num_computed_tokens, prompt_lens
        )
        return cut(found, input_batch, prompt_lens) if found else found

    return compute_prompt_logprobs


def _first(rows: Any, count: int) -> Any:
    return rows._replace(
        logprob_token_ids=rows.logprob_token_ids[:count],
        logprobs=rows.logprobs[:count],
        selected_token_ranks=rows.selected_token_ranks[:count],
    )
