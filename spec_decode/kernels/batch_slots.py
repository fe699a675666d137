"""Keeps what a step's graph reads of its batch, in one launch."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.sizes import cdiv

_BLOCK = 128


@triton.jit
def _slots_kernel(
    slots, last_sampled, kept_slots, last_tokens, num_reqs, size, BLOCK: tl.constexpr
):
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = req < num_reqs
    slot = tl.load(slots + req, mask=is_real, other=-1)
    token = tl.load(last_sampled + slot, mask=is_real, other=0)
    tl.store(kept_slots + req, slot, mask=req < size)
    tl.store(last_tokens + req, token, mask=is_real)


def keep_slots(
    slots: torch.Tensor,
    last_sampled: torch.Tensor,
    kept_slots: torch.Tensor,
    last_tokens: torch.Tensor,
    num_reqs: int,
) -> None:
    """Copy the request-state indices of a batch, and the token that each request drew last.

    Args:
        slots: int ``[>= num_reqs]``, request-state index of each request.
        last_sampled: int64, of ``max_reqs`` elements, by request-state index.
        kept_slots: int ``[max_reqs]``; behind the requests it gets -1.
        last_tokens: int64 ``[max_reqs]``; behind the requests it stays.
    """
    size = len(kept_slots)
    _slots_kernel[(cdiv(size, _BLOCK),)](
        slots, last_sampled, kept_slots, last_tokens, num_reqs, size, BLOCK=_BLOCK
    )
