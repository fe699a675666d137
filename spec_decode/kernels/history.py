"""Changes logits by each row's own history: what was emitted, then the tokens of its path."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv
from vllm_graft.spec_decode.trees.tree import TreeState


class PathTokens(NamedTuple):
    """The path from the root to each row of a batch that verifies trees. `tokens`: i32 ``[num_rows,
    width]``, the root's child first; the root's own token is part of the request already. Later
    places are undefined. `lengths`: i32 ``[num_rows]``, nodes of the path: 0 for a root, or a row
    of no tree."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])


@Kernel
@triton.jit
def _path_kernel(
    ids, nodes, slots, parents, depths, path_tokens, path_lengths, WIDTH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    node = tl.load(nodes + row)
    tree = tl.load(slots + row).to(tl.int64) * WIDTH
    first = row - node
    left = tl.load(depths + tree + node)
    tl.store(path_lengths + row, left)
    while left > 0:
        left -= 1
        token = tl.load(ids + first + node)
        tl.store(path_tokens + row * WIDTH + left, token)
        node = tl.load(parents + tree + node)


def path_tokens(
    ids: torch.Tensor, nodes: torch.Tensor, slots: torch.Tensor, tree: TreeState
) -> PathTokens:
    """Collect the tokens on the path to each row, those of a request together. `nodes` has the
    place of each row in its request, `slots` its request-state index, as `tree` has."""
    rows = ids.shape[0]
    tokens = torch.empty(rows, tree.width, dtype=torch.int32, device=ids.device)
    lengths = torch.empty(rows, dtype=torch.int32, device=ids.device)
    if rows:
        _path_kernel[(rows,)](
            ids, nodes, slots, tree.parents, tree.depths, tokens, lengths,
            WIDTH=tree.width, num_warps=1,
        )  # fmt: skip
    return PathTokens(tokens, lengths)


BLOCK = 2048
"""Tokens of the vocabulary that a program computes."""


class Penalties(NamedTuple):
    """VLLM's penalties, ``[max_reqs]`` by request-state index.

    Attributes:
        repetition: f32; 1 for none.
        frequency: f32; 0 for none.
        presence: f32; 0 for none.
        prompt_bits: i32 ``[max_reqs, ceil(vocab / 32)]``; a bit per token that is in the prompt.
        counts: i32 ``[max_reqs, vocab]``, how often each token was emitted.
    """

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
    prompt_bits: torch.Tensor
    counts: torch.Tensor


@Kernel
@triton.jit
def _penalties_kernel(
    logits, slots, path_tokens, path_lengths, repetitions, frequencies, presences, prompt_bits,
    counts, logits_stride, bits_stride, counts_stride, vocab,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    repetition = tl.load(repetitions + slot)
    frequency = tl.load(frequencies + slot)
    presence = tl.load(presences + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        count = tl.load(counts + slot * counts_stride + token, mask=inside, other=0)
        for place in range(tl.load(path_lengths + row)):
            count += (token == tl.load(path_tokens + row * WIDTH + place)).to(tl.int32)
        emitted = count > 0
        value = tl.load(logits + row * logits_stride + token, mask=inside, other=0.0)
        if repetition != 1.0:
            word = tl.load(prompt_bits + slot * bits_stride + token // 32, mask=inside, other=0)
            known = emitted | (((word >> (token % 32)) & 1) != 0)
            scale = tl.where(known, repetition, 1.0)
            value *= tl.where(value > 0, 1.0 / scale, scale)
        value -= frequency * count
        value -= presence * emitted
        tl.store(logits + row * logits_stride + token, value, mask=inside)


def penalize(
    logits: torch.Tensor, slots: torch.Tensor, paths: PathTokens, penalties: Penalties
) -> None:
    """Apply the penalties to logits f32 ``[num_rows, vocab]`` in place, by vLLM's arithmetic.
    `slots` has the request-state index of each row."""
    rows, vocab = logits.shape
    if not rows:
        return
    _penalties_kernel[(rows, cdiv(vocab, BLOCK))](
        logits, slots, *paths, *penalties,
        logits.stride(0), penalties.prompt_bits.stride(0), penalties.counts.stride(0), vocab,
        WIDTH=paths.width, BLOCK=BLOCK,
    )  # fmt: skip


class BadWords(NamedTuple):
    """VLLM's bad words, int32 by request-state index.

    Attributes:
        numbers: ``[max_reqs]``, bad words of each request.
        offsets: ``[max_reqs, max_words + 1]``, where each word begins among the tokens.
        tokens: ``[max_reqs, max_tokens]``, the words' tokens.
        all_tokens: ``[max_reqs, max_len]``, tokens of each request.
    """

    numbers: torch.Tensor
    offsets: torch.Tensor
    tokens: torch.Tensor
    all_tokens: torch.Tensor
    prompt_lens: torch.Tensor
    total_lens: torch.Tensor


@Kernel
@triton.jit
def _bad_words_kernel(
    logits, slots, path_tokens, path_lengths, numbers, offsets, word_tokens, all_tokens,
    prompt_lens, total_lens,
    logits_stride, offsets_stride, words_stride, tokens_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if word < tl.load(numbers + slot):
        first = tl.load(offsets + slot * offsets_stride + word)
        last = tl.load(offsets + slot * offsets_stride + word + 1) - 1
        words = word_tokens + slot * words_stride
        prompt = tl.load(prompt_lens + slot)
        total = tl.load(total_lens + slot)
        begin = total + tl.load(path_lengths + row) - (last - first)
        # Only what was emitted counts: a word that begins in the prompt is not looked for.
        matches = begin >= prompt
        for place in range(last - first):
            at = begin + place
            emitted = (at >= prompt) & (at < total)
            token = tl.load(all_tokens + slot * tokens_stride + at, mask=emitted, other=-1)
            drafted = tl.load(path_tokens + row * WIDTH + at - total, mask=at >= total, other=-1)
            wanted = tl.load(words + first + place)
            matches = matches & (tl.where(at >= total, drafted, token) == wanted)
        forbidden = tl.load(words + last)
        tl.store(logits + row * logits_stride + forbidden, float("-inf"), mask=matches)


def forbid_bad_words(
    logits: torch.Tensor, slots: torch.Tensor, paths: PathTokens, words: BadWords, most: int
) -> None:
    """Set to -inf, in place, the last token of a bad word whose rest ends a row's own history.
    `logits` are f32 ``[num_rows, vocab]``, `slots` the request-state index of each row; no request
    has more than `most` bad words."""
    rows = logits.shape[0]
    if not rows or not most:
        return
    _bad_words_kernel[(rows, most)](
        logits, slots, *paths, *words,
        logits.stride(0), words.offsets.stride(0), words.tokens.stride(0),
        words.all_tokens.stride(0),
        WIDTH=paths.width, num_warps=1,
    )  # fmt: skip


FORCED = 1.0e9
"""Logit of a token that must come next. It is vLLM's."""


class ThinkingBudgets(NamedTuple):
    """VLLM's thinking budgets, int32 by request-state index.

    Attributes:
        budgets: ``[max_reqs]``, tokens of reasoning at most; negative for no budget.
        starts: ``[max_reqs]``, where the last start marker among its tokens begins; -1: none.
        ends: the same of the last end marker.
        all_tokens: ``[max_reqs, max_len]``, tokens of each request.
        forced: ``[forced_len]``, the tokens that are forced when the budget is used up.
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
    own = tl.load(tokens + at, mask=at < total, other=-1)
    drafted = tl.load(path + at - total, mask=at >= total, other=-1)
    return tl.where(at < total, own, drafted)


@triton.jit
def _matches(tokens, path, total, at, marker, length):
    found = at >= 0
    for place in range(length):
        token = _token(tokens, path, total, tl.maximum(at + place, 0))
        found = found & (token == tl.load(marker + place))
    return found


@triton.jit
def _last_marker(tokens, path, total, history, marker, length, last):
    for at in range(tl.maximum(total - length + 1, 0), history - length + 1):
        if _matches(tokens, path, total, at, marker, length):
            last = at
    return last


@Kernel
@triton.jit
def _thinking_kernel(
    logits, slots, path_tokens, path_lengths, budgets, starts, ends, all_tokens, total_lens,
    start_marker, end_marker, forced,
    logits_stride, tokens_stride,
    start_len, end_len, forced_len,
    WIDTH: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
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
    """Force the end of the reasoning in rows whose own history has no budget left, in place.
    `logits` are f32 ``[num_rows, vocab]``, `slots` the request-state index of each row; `starts`
    and `ends` of `thinking` are up to date."""
    rows = logits.shape[0]
    if not rows:
        return
    _thinking_kernel[(rows,)](
        logits, slots, *paths, *thinking,
        logits.stride(0), thinking.all_tokens.stride(0),
        thinking.start_marker.shape[0], thinking.end_marker.shape[0], thinking.forced.shape[0],
        WIDTH=paths.width, FORCED=FORCED, num_warps=1,
    )  # fmt: skip
