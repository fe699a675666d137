"""vLLM's penalties, bad words and thinking budgets, told which tokens come before each node.

vLLM takes the rows before a row for the tokens before it, which in a tree are other branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_graft.seams.wrap import wrap
from vllm_graft.spec_decode.kernels.history import (
    BadWords,
    PathTokens,
    Penalties,
    ThinkingBudgets,
    end_reasoning,
    forbid_bad_words,
    path_tokens,
    penalize,
)

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    from vllm_graft.spec_decode.trees.tree import TreeState

    Apply = Callable[[torch.Tensor, LogitsContext], Any]


def follow_paths(sampler: Sampler, tree: TreeState) -> None:
    """Let vLLM's penalties, bad words and thinking budgets read each verified node's own path.

    The `tree` has the topology by request-state index.
    """
    for processor in sampler.logits_processors:
        if isinstance(processor, PenaltiesState):
            wrap(processor, "apply", _along_paths(_penalize, processor, tree))
        elif isinstance(processor, BadWordsState):
            wrap(processor, "apply", _along_paths(_forbid_bad_words, processor, tree))
    thinking = sampler.thinking_budget_state
    wrap(thinking, "apply", _along_paths(_end_reasoning, thinking, tree))


def _along_paths(
    change: Callable[[Any, Apply, torch.Tensor, LogitsContext, TreeState], None],
    state: Any,
    tree: TreeState,
) -> Callable[[Apply], Apply]:
    def then_change(original: Apply) -> Apply:
        def apply(logits: torch.Tensor, ctx: LogitsContext) -> Any:
            if len(logits) == len(ctx.idx_mapping_np):  # Without drafts a request has one row.
                return original(logits, ctx)
            change(state, original, logits, ctx, tree)
            return logits

        return apply

    return then_change


def _penalize(
    state: Any, original: Apply, logits: torch.Tensor, ctx: LogitsContext, tree: TreeState
) -> None:
    if state.use_penalty[ctx.idx_mapping_np].any():
        # vLLM writes into other memory in each step, so none of it is kept here.
        penalties = Penalties(
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        penalize(logits, ctx.expanded_idx_mapping, _paths(ctx, tree), penalties)


def _forbid_bad_words(
    state: Any, original: Apply, logits: torch.Tensor, ctx: LogitsContext, tree: TreeState
) -> None:
    if most := int(state.num_bad_words.np[ctx.idx_mapping_np].max()):
        requests = state.req_states
        words = BadWords(
            state.num_bad_words.gpu,
            state.bad_word_offsets.gpu,
            state.bad_word_token_ids.gpu,
            requests.all_token_ids.gpu,
            requests.prompt_len.gpu,
            requests.total_len.gpu,
        )
        forbid_bad_words(logits, ctx.expanded_idx_mapping, _paths(ctx, tree), words, most)


def _end_reasoning(
    state: Any, original: Apply, logits: torch.Tensor, ctx: LogitsContext, tree: TreeState
) -> None:
    if state.enabled and state.use_thinking_budget[ctx.idx_mapping_np].any():
        # Without rows vLLM only looks for markers among the tokens that came since.
        original(logits[:0], ctx)
        requests = state.req_states
        thinking = ThinkingBudgets(
            state.thinking_token_budget.gpu,
            state.cached_last_start,
            state.cached_last_end,
            requests.all_token_ids.gpu,
            requests.total_len.gpu,
            state.reasoning_start_token_ids,
            state.natural_reasoning_end_token_ids,
            state.reasoning_end_token_ids,
        )
        end_reasoning(logits, ctx.expanded_idx_mapping, _paths(ctx, tree), thinking)


def _paths(ctx: LogitsContext, tree: TreeState) -> PathTokens:
    return path_tokens(ctx.input_ids, ctx.expanded_local_pos, ctx.expanded_idx_mapping, tree)
