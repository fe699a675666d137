"""Ends the reasoning at each row whose own history has used up its request's thinking budget."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.history.path_tokens import PathTokens
from vllm_graft.spec_decode.kernels.listed_launch import Kernel

FORCED = 1.0e9
"""Logit of a token that must come next. It is vLLM's."""


@dataclass(frozen=True)
class ThinkingBudgets:
    """What vLLM keeps of each request for its thinking budget, by request-state index.

    Attributes:
        budgets: i32 ``[max_reqs]``, tokens of reasoning at most; negative for no budget.
        starts: i32 ``[max_reqs]``, where the last start marker among the request's own tokens
            begins; -1 for none.
        ends: i32 ``[max_reqs]``, the same of the last end marker.
        all_tokens: i32 ``[max_reqs, max_len]``, tokens of each request.
        total_lens: i32 ``[max_reqs]``, how many there are.
        start_marker: i32 ``[start_len]``, the tokens that begin the reasoning.
        end_marker: i32 ``[end_len]``, the tokens that end it.
        forced: i32 ``[forced_len]``, the tokens that are forced when the budget is used up.
    """

    budgets: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    all_tokens: torch.Tensor
    total_lens: torch.Tensor
    start_marker: torch.Tensor
    end_marker: torch.Tensor
    forced: torch.Tensor


@triton.jit
def _token(tokens, path, total, at):
    """Token number `at` of a history: the request's own tokens, then those of the path."""
    own = tl.load(tokens + at, mask=at < total, other=-1)
    drafted = tl.load(path + at - total, mask=at >= total, other=-1)
    return tl.where(at < total, own, drafted)


@triton.jit
def _matches(tokens, path, total, at, marker, length):
    """Whether the first `length` tokens of a marker stand at place `at`."""
    found = at >= 0
    for place in range(length):
        token = _token(tokens, path, total, tl.maximum(at + place, 0))
        found = found & (token == tl.load(marker + place))
    return found


@triton.jit
def _last_marker(tokens, path, total, history, marker, length, last):
    """Place of the last marker; `last` is the place of the last one that holds no draft."""
    for at in range(tl.maximum(total - length + 1, 0), history - length + 1):
        if _matches(tokens, path, total, at, marker, length):
            last = at
    return last


@Kernel
@triton.jit
def _thinking_kernel(
    logits,
    slots,
    path_tokens,
    path_lengths,
    budgets,
    starts,
    ends,
    all_tokens,
    total_lens,
    start_marker,
    end_marker,
    forced,
    logits_stride,
    tokens_stride,
    start_len,
    end_len,
    forced_len,
    WIDTH: tl.constexpr,
    FORCED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    budget = tl.load(budgets + slot)
    if budget >= 0:
        tokens = all_tokens + slot * tokens_stride
        path = path_tokens + row * WIDTH
        total = tl.load(total_lens + slot)
        history = total + tl.load(path_lengths + row)
        start = _last_marker(
            tokens, path, total, history, start_marker, start_len, tl.load(starts + slot)
        )
        end = _last_marker(tokens, path, total, history, end_marker, end_len, tl.load(ends + slot))
        is_thinking = (start >= 0) & (start > end)
        if is_thinking & (history - start - start_len >= budget):
            # The history may end within the forced tokens already: the next of them follows.
            done = 0
            for length in range(1, forced_len):
                if _matches(tokens, path, total, history - length, forced, length):
                    done = length
            tl.store(logits + row * logits_stride + tl.load(forced + done), FORCED)


def end_reasoning(
    logits: torch.Tensor, slots: torch.Tensor, paths: PathTokens, thinking: ThinkingBudgets
) -> None:
    """Force the end of the reasoning in rows whose history has no budget left, in place.

    Args:
        logits: f32 ``[num_rows, vocab]``.
        slots: i64 or i32 ``[num_rows]``, request-state index of each row.
        paths: the path to each row.
        thinking: what vLLM keeps of the requests; `starts` and `ends` are up to date.
    """
    rows = logits.shape[0]
    if not rows:
        return
    _thinking_kernel[(rows,)](
        logits,
        slots,
        paths.tokens,
        paths.lengths,
        thinking.budgets,
        thinking.starts,
        thinking.ends,
        thinking.all_tokens,
        thinking.total_lens,
        thinking.start_marker,
        thinking.end_marker,
        thinking.forced,
        logits.stride(0),
        thinking.all_tokens.stride(0),
        thinking.start_marker.shape[0],
        thinking.end_marker.shape[0],
        thinking.forced.shape[0],
        WIDTH=paths.width,
        FORCED=FORCED,
        num_warps=1,
    )
