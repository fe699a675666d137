"""Repetition, frequency and presence penalties on each row's logits, by its own history."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.history.path_tokens import PathTokens
from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv

BLOCK = 2048
"""Tokens of the vocabulary that a program computes."""


@dataclass(frozen=True)
class Penalties:
    """What vLLM keeps of each request for its penalties, by request-state index.

    Attributes:
        repetition: f32 ``[max_reqs]``; 1 for none.
        frequency: f32 ``[max_reqs]``; 0 for none.
        presence: f32 ``[max_reqs]``; 0 for none.
        prompt_bits: i32 ``[max_reqs, ceil(vocab / 32)]``; a bit is set if the token is in the
            prompt.
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
    logits,
    slots,
    path_tokens,
    path_lengths,
    repetitions,
    frequencies,
    presences,
    prompt_bits,
    counts,
    logits_stride,
    bits_stride,
    counts_stride,
    vocab,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    """Apply the penalties in place. The arithmetic is vLLM's, in the same order.

    Args:
        logits: f32 ``[num_rows, vocab]``.
        slots: i64 or i32 ``[num_rows]``, request-state index of each row.
        paths: the path to each row.
        penalties: what vLLM keeps of the requests.
    """
    rows, vocab = logits.shape
    if not rows:
        return
    _penalties_kernel[(rows, cdiv(vocab, BLOCK))](
        logits,
        slots,
        paths.tokens,
        paths.lengths,
        penalties.repetition,
        penalties.frequency,
        penalties.presence,
        penalties.prompt_bits,
        penalties.counts,
        logits.stride(0),
        penalties.prompt_bits.stride(0),
        penalties.counts.stride(0),
        vocab,
        WIDTH=paths.width,
        BLOCK=BLOCK,
    )
