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

    from vllm_graft.spec_decode.trees.topology import TreeState

    Apply = Callable[[torch.Tensor, LogitsContext], torch.Tensor]
    ApplyInPlace = Callable[[torch.Tensor, LogitsContext], None]


def follow_paths(sampler: Sampler, tree: TreeState) -> None:
    """Let what reads a request's history in a sampler read each node's own path.

    Args:
        sampler: vLLM's. Its penalties, bad words and thinking budgets are changed, nothing else.
        tree: the trees that are verified, by request-state index.
    """
    for processor in sampler.logits_processors:
        if isinstance(processor, PenaltiesState):
            wrap(processor, "apply", _penalties(processor, tree))
        elif isinstance(processor, BadWordsState):
            wrap(processor, "apply", _bad_words(processor, tree))
    thinking = sampler.thinking_budget_state
    wrap(thinking, "apply", _thinking_budgets(thinking, tree))


def _penalties(state: Any, tree: TreeState) -> Callable[[Apply], Apply]:
    def by_path(original: Apply) -> Apply:
        def apply(logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
            if _has_no_drafts(logits, ctx):
                return original(logits, ctx)
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
            return logits

        return apply

    return by_path


def _bad_words(state: Any, tree: TreeState) -> Callable[[Apply], Apply]:
    def by_path(original: Apply) -> Apply:
        def apply(logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
            if _has_no_drafts(logits, ctx):
                return original(logits, ctx)
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
                paths = _paths(ctx, tree)
                forbid_bad_words(logits, ctx.expanded_idx_mapping, paths, words, most)
            return logits

        return apply

    return by_path


def _thinking_budgets(state: Any, tree: TreeState) -> Callable[[ApplyInPlace], ApplyInPlace]:
    def by_path(original: ApplyInPlace) -> ApplyInPlace:
        def apply(logits: torch.Tensor, ctx: LogitsContext) -> None:
            if _has_no_drafts(logits, ctx):
                return original(logits, ctx)
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
            return None

        return apply

    return by_path


def _has_no_drafts(logits: torch.Tensor, ctx: LogitsContext) -> bool:
    return len(logits) == len(ctx.idx_mapping_np)


def _paths(ctx: LogitsContext, tree: TreeState) -> PathTokens:
    return path_tokens(ctx.input_ids, ctx.expanded_local_pos, ctx.expanded_idx_mapping, tree)
