"""Forbids the last token of a bad word at each row whose own history ends with the rest of it."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.history.path_tokens import PathTokens
from vllm_graft.spec_decode.kernels.listed_launch import Kernel


@dataclass(frozen=True)
class BadWords:
    """What vLLM keeps of each request for its bad words, by request-state index.

    Attributes:
        numbers: i32 ``[max_reqs]``, bad words of each request.
        offsets: i32 ``[max_reqs, max_words + 1]``, where each word begins among the tokens.
        tokens: i32 ``[max_reqs, max_tokens]``, the words' tokens.
        all_tokens: i32 ``[max_reqs, max_len]``, tokens of each request.
        prompt_lens: i32 ``[max_reqs]``, how many of these are the prompt's.
        total_lens: i32 ``[max_reqs]``, how many there are.
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
    logits,
    slots,
    path_tokens,
    path_lengths,
    numbers,
    offsets,
    word_tokens,
    all_tokens,
    prompt_lens,
    total_lens,
    logits_stride,
    offsets_stride,
    words_stride,
    tokens_stride,
    WIDTH: tl.constexpr,
):
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
    """Set the logits of forbidden tokens to -inf, in place.

    Args:
        logits: f32 ``[num_rows, vocab]``.
        slots: i64 or i32 ``[num_rows]``, request-state index of each row.
        paths: the path to each row.
        words: what vLLM keeps of the requests.
        most: bad words of a request, at most.
    """
    rows = logits.shape[0]
    if not rows or not most:
        return
    _bad_words_kernel[(rows, most)](
        logits,
        slots,
        paths.tokens,
        paths.lengths,
        words.numbers,
        words.offsets,
        words.tokens,
        words.all_tokens,
        words.prompt_lens,
        words.total_lens,
        logits.stride(0),
        words.offsets.stride(0),
        words.tokens.stride(0),
        words.all_tokens.stride(0),
        WIDTH=paths.width,
        num_warps=1,
    )
