"""The gated delta rule over trees (Yang et al. 2024, arXiv 2412.06464).

A head's state is a matrix ``S`` ``[V, K]``. A row decays it, replaces what it holds under the key
``k`` by a share ``beta`` of the value ``v``, and reads it with the query ``q``.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.node_state import (
    continued,
    keep,
    replaced,
    request_of,
    require_contiguous,
    softplus,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

_MAX_VALUES = 32
"""Rows of a head's state that a program keeps, as in vLLM's kernel for chains."""


class DeltaGates(NamedTuple):
    """What decays a head's state, and how much of a row's value enters it.

    Attributes:
        decays: ``[num_rows, value_heads]``, before ``softplus``.
        betas: ``[num_rows, value_heads]``, before the sigmoid.
        log_rates: f32 ``[value_heads]``, logarithms of the rates of decay.
        decay_bias: ``[value_heads]``, added to ``decays``.
    """

    decays: torch.Tensor
    betas: torch.Tensor
    log_rates: torch.Tensor
    decay_bias: torch.Tensor


@triton.jit
def ruled(state, key, value, x, beta, rate):
    """The state behind a row.

    Args:
        state: f32 ``[V, K]``, before it.
        key: f32 ``[K]``, of length 1.
        value: f32 ``[V]``.
        x: the row's decay with its bias, before ``softplus``.
        beta: the share of the value that enters.
        rate: the head's rate of decay.
    """
    state *= tl.exp(-rate * softplus(x))
    return replaced(state, key, value, beta)


@Kernel
@triton.jit
def _tree_delta_rule_kernel(
    rows,
    decays,
    betas,
    log_rates,
    decay_bias,
    states,
    columns,
    num_accepted,
    query_start_loc,
    parents,
    outputs,
    scale,
    row_stride,
    decay_stride,
    beta_stride,
    block_stride,
    column_stride,
    output_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    req = tl.program_id(1) // VALUE_HEADS
    head = tl.program_id(1) % VALUE_HEADS
    key_head = head // (VALUE_HEADS // KEY_HEADS)
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
    rate = tl.exp(tl.load(log_rates + head).to(tl.float32))
    shift = tl.load(decay_bias + head).to(tl.float32)
    rows += first * row_stride
    outputs += first * output_stride + head * VALUE + value
    parents += first
    state = tl.load(states + before * block_stride + place, mask=both, other=0).to(tl.float32)
    for row in range(0, num_rows):
        parent = tl.load(parents + row)
        state = continued(state, row, parent, states, columns, block_stride, place, both)
        vectors = rows + row * row_stride
        q = tl.load(vectors + key_head * KEY + key, mask=is_key, other=0).to(tl.float32)
        vectors += KEY_HEADS * KEY
        k = tl.load(vectors + key_head * KEY + key, mask=is_key, other=0).to(tl.float32)
        vectors += KEY_HEADS * KEY
        v = tl.load(vectors + head * VALUE + value, mask=is_value, other=0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q) + 1e-6) * scale
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        x = tl.load(decays + (first + row) * decay_stride + head).to(tl.float32) + shift
        beta = tl.sigmoid(tl.load(betas + (first + row) * beta_stride + head).to(tl.float32))
        state = ruled(state, k, v, x, beta, rate)
        tl.store(outputs + row * output_stride, tl.sum(state * q[None, :], 1), mask=is_value)
        keep(state, row, states, columns, block_stride, place, both)


def tree_delta_rule(
    rows: torch.Tensor,
    gates: DeltaGates,
    states: torch.Tensor,
    which: RecurrentRows,
    outputs: torch.Tensor,
    *,
    key_heads: int,
) -> None:
    """Run the rows of trees: each continues its parent's state and leaves its own in its column.

    The root continues the last accepted row's state. The arithmetic is that of vLLM's
    ``fused_sigmoid_gating_delta_rule_update``, in the same order, so that a chain's rows have the
    same bits. Where a row's parent is not the row before, the parent's state is read back from its
    column, rounded to the states' dtype.

    Args:
        rows: ``[num_rows, 2 * key_heads * K + value_heads * V]``, queries, keys and values of the
            heads behind each other, features contiguous, request after request.
        gates: decays and betas of the rows.
        states: ``[num_blocks, value_heads, V, K]``, contiguous but for the first stride.
        which: which row continues which, and the columns.
        outputs: ``[num_rows, value_heads, V]``, receives the result; heads contiguous.
        key_heads: heads of queries and keys, a divisor of ``value_heads``.

    Raises:
        ValueError: if the states or the outputs are not contiguous as they have to be.
    """
    _, value_heads, value, key = states.shape
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    values = min(_MAX_VALUES, next_power_of_2(value))
    decays, betas = gates.decays, gates.betas
    _tree_delta_rule_kernel[(cdiv(value, values), which.num_reqs * value_heads)](
        rows,
        decays,
        betas,
        gates.log_rates,
        gates.decay_bias,
        states,
        which.columns,
        which.num_accepted,
        which.query_start_loc,
        which.parents,
        outputs,
        key**-0.5,
        rows.stride(0),
        decays.stride(0),
        betas.stride(0),
        states.stride(0),
        which.columns.stride(0),
        outputs.stride(0),
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        KEY=key,
        VALUE=value,
        KEYS=next_power_of_2(key),
        VALUES=values,
        num_warps=4,
    )
