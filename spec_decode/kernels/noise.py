"""The noise of vLLM's sampler, computed where it is needed: at a draft's own tokens."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Noise(NamedTuple):
    """The Gumbel noise with which vLLM's sampler will draw from the target.

    The draw at a position is the argmax of ``logits / temperature + noise``, and the noise is a
    function of the request's seed, the position and the token: it is known before the target
    runs. A draft that ranks tokens with this noise finds what the target will draw far more often
    than one that ranks by probability (coupling without communication: Daliri, Musco and Suresh
    2024, arXiv:2408.07978).

    Attributes:
        temperature: f32 ``[max_reqs]`` by request-state index; rows at 0 get no noise.
        seeds: i64 ``[max_reqs]``, likewise.
        idx_mapping: i32 or i64 ``[num_reqs]``, request-state index, negative for padding.
        positions: i64 ``[>= num_rows]``, contiguous; plus `offset`, the position of the token
            before the drawn one.
        rows: rows of logits per request.
    """

    temperature: torch.Tensor
    seeds: torch.Tensor
    idx_mapping: torch.Tensor
    positions: torch.Tensor
    rows: int
    offset: int = 0
    fp64: bool = False


@triton.jit
def _mixed(state, word):
    """One round of MurmurHash3 (x86, 32 bits; Appleby 2011, in the public domain)."""
    word = word * 0xCC9E2D51
    word = (word << 15) | (word >> 17)
    state = state ^ (word * 0x1B873593)
    state = (state << 13) | (state >> 19)
    return state * 5 + 0xE6546B64


@triton.jit
def _hashed(seed, position, token, start):
    """Hash of four words: the seed's two halves, the position, the token; uint32."""
    low: tl.constexpr = 0xFFFFFFFF
    zero = (seed & 0).to(tl.uint32)
    state = _mixed(zero + start, (seed & low).to(tl.uint32))
    state = _mixed(state, ((seed >> 32) & low).to(tl.uint32))
    state = _mixed(state, (position & low).to(tl.uint32))
    # 16 is the message's length in bytes.
    state = _mixed(state, token.to(tl.uint32)) ^ 16
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return state ^ (state >> 16)


@triton.jit
def gumbel_noise(seed, position, token, FP64: tl.constexpr):
    """The sampler's Gumbel noise, f32, at each ``token`` for the draw after ``position``.

    ``FP64`` is the sampler's 64-bit mode, which draws other numbers.
    """
    first = _hashed(seed, position, token, 0)
    if FP64:
        second = _hashed(seed, position, token, 0x9E3779B9)
        bits = ((second.to(tl.uint64) << 32) | first.to(tl.uint64)) >> 11
        uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
        noise = -tl.log(-tl.log(uniform)).to(tl.float32)
    else:
        high = (first >> 16).to(tl.int32).to(tl.float32)
        low = (first & 0xFFFF).to(tl.int32).to(tl.float32)
        uniform = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
        # -log(1 - u). A small u means large noise, which decides a draw, so for small u a series
        # keeps all bits.
        series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
        direct = -tl.log(tl.maximum(1.0 - uniform, 5.9604645e-08))
        noise = -tl.log(tl.where(uniform < 0.001, series, direct))
    return noise
