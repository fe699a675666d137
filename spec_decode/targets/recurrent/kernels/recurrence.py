"""Recurrences over trees, a row after another: each row's state is written."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    Gates,
    arguments_of,
    gated,
    of_length_one,
    places_of,
    rate_of,
    stepped,
    tile_of,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import (
    RecurrentRows,
    request_of,
    require_contiguous,
)

_BY_KEY = tl.constexpr(int(Decay.BY_KEY))
_SELECTIVE = tl.constexpr(int(Decay.SELECTIVE))


@triton.jit
def continued(state, row, parent, states, columns, block_stride, place, mask):
    """The state that a row continues: `state` behind the row before, or its parent's, read back."""
    if (parent >= 0) & (parent != row - 1):
        # Other threads of this program may have stored what this one loads.
        tl.debug_barrier()
        source = tl.load(columns + parent).to(tl.int64)
        state = tl.load(states + source * block_stride + place, mask=mask, other=0).to(tl.float32)
    return state


@triton.jit
def keep(state, row, states, columns, block_stride, place, mask):
    """Store the state of a row in the row's block; block 0 keeps nothing."""
    target = tl.load(columns + row).to(tl.int64)
    if target > 0:
        tl.store(states + target * block_stride + place, state, mask=mask)


@Kernel
@triton.jit
def _tree_recurrence_kernel(
    rows,
    decays,
    betas,
    rates,
    bias,
    skips,
    states,
    columns,
    num_accepted,
    query_start_loc,
    parents,
    outputs,
    scale,
    lower_bound,
    row_stride,
    decay_stride,
    beta_stride,
    block_stride,
    column_stride,
    output_stride,
    DECAY: tl.constexpr,
    BOUNDED: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    req = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first, num_rows, columns, before = request_of(
        req, query_start_loc, num_accepted, columns, column_stride
    )
    if before <= 0:
        return
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY, value < VALUE
    both = is_value[:, None] & is_key[None, :]
    place = head * VALUE * KEY + value[:, None] * KEY + key[None, :]
    rate = rate_of(rates, head, DECAY)
    if DECAY == _BY_KEY:
        shift = tl.load(bias + head * KEY + key, mask=is_key, other=0).to(tl.float32)
        decays += head * KEY + key
    else:
        shift = tl.load(bias + head).to(tl.float32)
        decays += head
    if DECAY == _SELECTIVE:
        skip = tl.load(skips + head).to(tl.float32)
    rows += first * row_stride
    outputs += first * output_stride + head * VALUE + value
    parents += first
    to_query, to_key, to_value = places_of(head, DECAY, GROUPS, HEADS, KEY, VALUE)
    state = tl.load(states + before * block_stride + place, mask=both, other=0).to(tl.float32)
    for row in range(0, num_rows):
        parent = tl.load(parents + row)
        state = continued(state, row, parent, states, columns, block_stride, place, both)
        vectors = rows + row * row_stride
        q = tl.load(vectors + to_query + key, mask=is_key, other=0).to(tl.float32)
        k = tl.load(vectors + to_key + key, mask=is_key, other=0).to(tl.float32)
        v = tl.load(vectors + to_value + value, mask=is_value, other=0).to(tl.float32)
        line = first + row
        if DECAY == _BY_KEY:
            x = tl.load(decays + line * decay_stride, mask=is_key, other=0).to(tl.float32)
        else:
            x = tl.load(decays + line * decay_stride).to(tl.float32)
        beta = None
        if DECAY != _SELECTIVE:
            q = of_length_one(q, DECAY) * scale
            k = of_length_one(k, DECAY)
            beta = tl.load(betas + line * beta_stride + head).to(tl.float32)
        decay, share = gated(x + shift, beta, rate, lower_bound, DECAY, BOUNDED)
        state = stepped(state, k, v, decay, share, DECAY)
        out = tl.sum(state * q[None, :], 1)
        if DECAY == _SELECTIVE:
            out += v * skip
        tl.store(outputs + row * output_stride, out, mask=is_value)
        keep(state, row, states, columns, block_stride, place, both)


def tree_recurrence(
    rows: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    which: RecurrentRows,
    outputs: torch.Tensor,
    *,
    groups: int,
) -> None:
    """Run the rows of trees: each continues its parent's state and leaves its own in its column.

    The root continues the last accepted row's state. The arithmetic is that of vLLM's
    ``fused_sigmoid_gating_delta_rule_update``, ``fused_recurrent_kda`` or
    ``selective_state_update``, in the same order, so that a chain's rows have the same bits. Where
    a row's parent is not the row before, its state is read back from its column, rounded to the
    states' dtype.

    Args:
        rows: ``[num_rows, 2 * groups * K + heads * V]``, queries, keys and values of all heads
            behind each other (of Mamba-2 inputs, ``B`` and ``C``), features contiguous, request
            after request.
        states: ``[num_blocks, heads, V, K]``, contiguous but for the first stride.
        outputs: ``[num_rows, heads, V]``, receives the result; heads contiguous.
        groups: heads of queries and keys, or groups of ``B`` and ``C``; a divisor of ``heads``.
    """
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    given = arguments_of(rows, gates, states, which, outputs, groups)
    value = given["VALUE"]
    values, warps = tile_of(Decay(given["DECAY"]), value)
    _tree_recurrence_kernel[(cdiv(value, values), which.num_reqs * given["HEADS"])](
        **given, KEYS=next_power_of_2(given["KEY"]), VALUES=values, num_warps=warps
    )
