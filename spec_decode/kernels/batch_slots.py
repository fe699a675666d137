"""Keeps what a step's graph reads of its batch, in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv
from vllm_graft.spec_decode.kernels.ngram_insert import Learned, learn

_BLOCK = 128


@Kernel
@triton.jit(do_not_specialize=["num_reqs"])
def _slots_kernel(
    slots, last_sampled, kept_slots, last_tokens,
    pending, rates, counts, published,
    num_reqs, size,
    BLOCK: tl.constexpr, PAD: tl.constexpr, COUNTS: tl.constexpr,
    MEMORY: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = req < num_reqs
    slot = tl.load(slots + req, mask=is_real, other=-1)
    token = tl.load(last_sampled + slot, mask=is_real, other=0)
    tl.store(kept_slots + req, slot, mask=req < size)
    tl.store(last_tokens + req, token, mask=is_real)
    if tl.program_id(0) == 0:
        learn(pending, rates, counts, published, PAD, COUNTS, MEMORY, LOW, HIGH)


def keep_slots(
    slots: torch.Tensor,
    last_sampled: torch.Tensor,
    kept_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    num_reqs: int,
    learned: Learned,
) -> None:
    """Copy the request-state indices of a batch, and the token that each request drew last; and
    learn from the step before, as `learn_rates` does.

    Args:
        slots: int ``[>= num_reqs]``, request-state index of each request.
        last_sampled: int64, of ``max_reqs`` elements, by request-state index.
        kept_slots: int ``[max_reqs]``; behind the requests it gets -1.
        last_tokens: int64 ``[max_reqs]``; behind the requests it stays.
        learned: what is learned.
    """
    size = len(kept_slots)
    _slots_kernel[(cdiv(size, _BLOCK),)](
        slots, last_sampled, kept_slots, last_tokens, *learned, num_reqs, size,
        BLOCK=_BLOCK, **learned.constants,
    )  # fmt: skip
