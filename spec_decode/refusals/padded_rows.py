"""Which settings of the scheduler leave no room for the rows of drafts, or of a new request.

A request with one token left to compute (a prompt of one token beside other requests, or a prompt
of which all other tokens are cached) would be the only one in its batch without drafts. vLLM gives
it as many rows as a full tree has, so that the batch keeps its CUDA graph. It does so where the
number of drafts is the same in every step, with a tree as with a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm_graft.base.refusal import Found
from vllm_graft.spec_decode.config.tree_config import TreeConfig

BUFFERS = "vLLM sizes its buffers for that many rows."


def too_many_rows(
    whose: str, width: int, times: str, scheduler: Any, or_else: str = ""
) -> Iterator[Found]:
    """Find a pass of more rows than a batch may have.

    Args:
        whose: the pass.
        width: its rows per request.
        times: the same in words.
        scheduler: vLLM's ``SchedulerConfig``.
        or_else: another remedy.
    """
    rows, most = scheduler.max_num_seqs * width, scheduler.max_num_batched_tokens
    if rows > most:
        yield Found(
            f"{whose} has {rows} rows (--max-num-seqs {scheduler.max_num_seqs} times {times}), but "
            f"--max-num-batched-tokens is {most}",
            f"set --max-num-seqs to {most // width} or less, or --max-num-batched-tokens to "
            f"{rows} or more{or_else}",
        )


@dataclass(frozen=True)
class TightLimit:
    """A setting of the scheduler that is too small."""

    flag: str
    value: int
    least: int
    """The smallest value that works."""


def full_rows(tree: TreeConfig, vllm_config: Any) -> int:
    """Rows of a full tree, the root's included; 0 if vLLM gives no request so many by itself.

    It does not if the number of drafts changes with the batch. With data parallelism vLLM drops
    such a table.
    """
    speculative = vllm_config.speculative_config
    changes = speculative.num_speculative_tokens_per_batch_size is not None
    if tree.shape == "auto" or (changes and vllm_config.parallel_config.data_parallel_size == 1):
        return 0
    return 1 + (tree.nodes or int(speculative.num_speculative_tokens))


def tight_threshold(tree: TreeConfig, vllm_config: Any) -> TightLimit | None:
    """The threshold that cuts the rows of such a request, so that the engine stops.

    The ``adaptive`` threshold is no way out: with many requests it falls to the number given.
    """
    value = vllm_config.scheduler_config.long_prefill_token_threshold
    rows = full_rows(tree, vllm_config)
    if not 0 < value < rows:
        return None
    return TightLimit("--long-prefill-token-threshold", value, rows)


def tight_budgets(tree: TreeConfig, vllm_config: Any) -> list[TightLimit]:
    """Budgets of a step that never hold the rows of such a request, so that it waits forever."""
    rows, scheduler = full_rows(tree, vllm_config), vllm_config.scheduler_config
    if not rows:
        return []
    batched, scheduled = scheduler.max_num_batched_tokens, scheduler.max_num_scheduled_tokens
    # Rows of the batch that vLLM leaves to the draft.
    least = rows + vllm_config.speculative_config.max_num_new_slots_for_drafting
    limits = [TightLimit("--max-num-batched-tokens", batched, least)]
    # vLLM fills in the one from the other.
    if scheduled is not None and scheduled != batched:
        limits.append(TightLimit("--max-num-scheduled-tokens", scheduled, rows))
    return [limit for limit in limits if limit.value < limit.least]
