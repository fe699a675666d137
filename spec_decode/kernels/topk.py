"""The best tokens of a row of logits, with their log-probabilities."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import (
    Kernel,
    cdiv,
    check_rows,
    next_power_of_2,
    rows_per_program,
    topk_block,
    topk_merge_warps,
)


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
        positions: i64 ``[>= num_rows]``, contiguous; plus `offset`, of the token before the drawn
            one.
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
    """The sampler's Gumbel noise, f32, at each ``token`` for the draw after ``position``. ``FP64``
    is the sampler's 64-bit mode, which draws other numbers."""
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
        # -log(1 - u). A small u is large noise, which decides a draw: a series keeps its bits.
        series = uniform * (1.0 + uniform * (0.5 + uniform * 0.33333334))
        direct = -tl.log(tl.maximum(1.0 - uniform, 5.9604645e-08))
        noise = -tl.log(tl.where(uniform < 0.001, series, direct))
    return noise


@Kernel
@triton.jit
def _block_kernel(
    logits, biases, target_ids, temperature, seeds, idx_mapping, positions, peaks, sums,
    best_orders, best_tokens,
    logits_stride, bias_stride,
    vocab_size, sharpness,
    BLOCKS: tl.constexpr, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr, BLOCK: tl.constexpr,
    NOISY: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, NODES: tl.constexpr,
    GROUP: tl.constexpr, MAPPED: tl.constexpr, FP64: tl.constexpr,
):  # fmt: skip
    """One block of ``GROUP`` rows, which share their logits but for a bias. What the rows share is
    read once, and their noise, which depends on the position, drawn once."""
    first = tl.program_id(0).to(tl.int64) * GROUP
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    shared = logits + first // NODES * logits_stride
    base = tl.load(shared + token, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISY:
        # The draw of the target: logits divided by temperature, plus its noise; none at 0.
        slot = tl.load(idx_mapping + first // ROWS).to(tl.int64)
        found = tl.load(temperature + slot, mask=slot >= 0, other=0.0)
        heat = tl.where(found > 0, found, 1.0)
        noise = tl.zeros([BLOCK], tl.float32)
        if found > 0:
            key = token
            if MAPPED:
                key = tl.load(target_ids + token, mask=inside, other=0).to(tl.int32)
            position = tl.load(positions + first) + OFFSET
            noise = gumbel_noise(tl.load(seeds + slot), position, key, FP64)
    for each in range(GROUP):
        row = first + each
        logit = base
        if biases is not None:
            bias = tl.load(biases + row * bias_stride + token, mask=inside, other=0.0)
            logit = base + bias.to(tl.float32)
        # Padding rows of a graph may hold NaN, which would be chosen by no comparison below.
        logit = tl.where(logit == logit, logit, float("-inf")) * sharpness
        if NOISY:
            logit = tl.where(inside, logit / heat + noise, float("-inf"))
        part = row * BLOCKS + block
        order = tl.where(inside, ordered(logit), NONE)
        # A block that is -inf throughout sums to nothing, not to NaN.
        floor = tl.maximum(unordered(tl.max(order, 0)), -3.0e38)
        total = tl.sum(tl.where(inside, tl.exp(logit - floor), 0.0), 0)
        tl.store(peaks + part, floor)
        tl.store(sums + part, total)
        best, chosen = best_of(order, token, TOPK, TOPK_PAD)
        place = tl.arange(0, TOPK_PAD)
        tl.store(best_orders + part * TOPK + place, best, mask=place < TOPK)
        tl.store(best_tokens + part * TOPK + place, chosen, mask=place < TOPK)


@Kernel
@triton.jit
def _merge_kernel(
    peaks, sums, best_orders, best_tokens, target_ids, logp, tokens,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, TOPK: tl.constexpr, TOPK_PAD: tl.constexpr,
    ENTRIES_PAD: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """One row: merge the sums of its blocks, and choose the best of their best tokens."""
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, ENTRIES_PAD)
    inside = entry < BLOCKS * TOPK
    order = tl.load(best_orders + row * BLOCKS * TOPK + entry, mask=inside, other=NONE)
    token = tl.load(best_tokens + row * BLOCKS * TOPK + entry, mask=inside, other=LAST)
    block = tl.arange(0, BLOCKS_PAD)
    peak = tl.load(peaks + row * BLOCKS + block, mask=block < BLOCKS, other=-3.0e38)
    total = tl.load(sums + row * BLOCKS + block, mask=block < BLOCKS, other=0.0)
    highest = tl.max(peak, 0)
    norm = highest + tl.log(tl.sum(total * tl.exp(peak - highest), 0))

    # No token occurs twice in a row, except among missing entries.
    best, chosen = best_of(order, token, TOPK, TOPK_PAD)
    place = tl.arange(0, TOPK_PAD)
    kept = place < TOPK
    number = unordered(best)
    value = tl.where(number > float("-inf"), number - norm, number)
    tl.store(logp + row * TOPK + place, value, mask=kept)
    found = chosen.to(tl.int64)
    if MAPPED:
        found = tl.load(target_ids + found, mask=kept, other=0)
    tl.store(tokens + row * TOPK + place, found, mask=kept)


def topk_logprobs(
    logits: torch.Tensor, topk: int, target_ids: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None, noise: Noise | None = None,
    sharpness: float = 1.0, biases: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The `topk` best tokens of each row, best first, ties by lower index.

    It takes two launches and no float32 copy of the logits. Ties and NaN (which counts as -inf) are
    resolved by fixed rules, so tensor-parallel ranks that hold the same logits agree. Returns
    log-probabilities within the row float32 and ids int64, ``[num_rows, topk]`` each. Raises
    `ValueError` if `topk` is out of range, or shapes or strides are not these.

    Args:
        logits: bf16, fp16 or fp32 ``[num_rows, vocab]``, last dimension contiguous.
        target_ids: int64 ``[vocab]``, the id to return for each index; None returns the index.
        out: contiguous tensors that receive what is returned.
        noise: where a row's temperature is above 0, tokens are ranked by the sum of this and
            ``logits / temperature``, and the log-softmax of that is returned.
        sharpness: factor of the logits, above 0.
        biases: like the logits, of which each row is then shared by several rows in succession,
            whose biases are added to it. The sums are formed in float32 where they are read, and
            stored nowhere; a program may take several of the rows. `noise` has as many ``rows``, an
            ``offset`` of 0, and one position for rows that share their logits.
    """
    rows = logits if biases is None else biases
    num_rows, vocab_size = rows.shape
    nodes = num_rows // max(1, len(logits))
    logp, tokens = _outputs(rows, topk, out)
    if num_rows == 0:
        return logp, tokens
    block, block_warps = topk_block(vocab_size)
    blocks = cdiv(vocab_size, block)
    group = rows_per_program(num_rows, nodes, blocks)
    # Of each block of each row: the largest number and the sum of exponentials relative to it, then
    # the best numbers by `ordered`, and their places in the row.
    parts = (
        *torch.empty(2, num_rows, blocks, dtype=torch.float32, device=rows.device),
        *torch.empty(2, num_rows, blocks, topk, dtype=torch.int32, device=rows.device),
    )
    _block_kernel[(num_rows // group, blocks)](
        logits, biases, target_ids, *(noise[:4] if noise is not None else (None, None, None, None)),
        *parts, logits.stride(0), 0 if biases is None else biases.stride(0),
        vocab_size, sharpness,
        BLOCKS=blocks, TOPK=topk, TOPK_PAD=next_power_of_2(topk), BLOCK=block,
        NOISY=noise is not None, ROWS=1 if noise is None else noise.rows,
        OFFSET=0 if noise is None else noise.offset, NODES=nodes, GROUP=group,
        MAPPED=target_ids is not None, FP64=noise is not None and noise.fp64, num_warps=block_warps,
    )  # fmt: skip
    _merge_kernel[(num_rows,)](
        *parts, target_ids, logp, tokens,
        BLOCKS=blocks, BLOCKS_PAD=next_power_of_2(blocks), TOPK=topk,
        TOPK_PAD=next_power_of_2(topk), ENTRIES_PAD=next_power_of_2(blocks * topk),
        MAPPED=target_ids is not None, num_warps=topk_merge_warps(blocks * topk),
    )  # fmt: skip
    return logp, tokens


def _outputs(
    logits: torch.Tensor, topk: int, out: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, vocab_size = logits.shape
    if not 1 <= topk <= vocab_size:
        raise ValueError(f"topk must be 1 to {vocab_size} (the vocabulary), got {topk}")
    check_rows(logits)
    logp, tokens = out or (
        torch.empty(num_rows, topk, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, topk, dtype=torch.int64, device=logits.device),
    )
    return logp, tokens


NONE = tl.constexpr(-(2**31))
"""Below every result of `ordered`: marks a missing entry."""

LAST = tl.constexpr(2**31 - 1)
"""Above every index."""


@triton.jit
def ordered(number):
    """An int32 per float32, in the same order: equal numbers are equal, NaN is above all."""
    # Minus zero becomes zero, as the two are equal.
    bits = (number + 0.0).to(tl.int32, bitcast=True)
    # The bits of floats order like integers once the bits of negative numbers are inverted.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(order):
    """The float32 for which `ordered` returned this int32."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def best_of(left, index, COUNT: tl.constexpr, COUNT_PAD: tl.constexpr):
    """The `COUNT` largest values of `left`, largest first; ties go to the lower `index`. `left`
    holds int32 of `ordered`. The indices of values above `NONE` must differ. Returns values and
    indices, int32 ``[COUNT_PAD]`` each; entries beyond `COUNT` are undefined."""
    place = tl.arange(0, COUNT_PAD)
    best = tl.full([COUNT_PAD], NONE, tl.int32)
    chosen = tl.zeros([COUNT_PAD], tl.int32)
    for j in range(COUNT):
        top = tl.max(left, 0)
        pick = tl.min(tl.where(left == top, index, LAST), 0)
        best = tl.where(place == j, top, best)
        chosen = tl.where(place == j, pick, chosen)
        left = tl.where(index == pick, NONE, left)
    return best, chosen
