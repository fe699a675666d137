"""The delta rule with a decay per key: Kimi Delta Attention (KDA, arXiv 2510.26692), over trees.

A head's state is a matrix ``S`` ``[V, K]``. A row decays each of its columns by a rate of its own,
then does what the gated delta rule does: it replaces what the state holds under the key ``k`` by a
share ``beta`` of the value ``v``, and reads the state with the query ``q``.
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

_MAX_VALUES = 8
"""Rows of a head's state that a program keeps. With one warp, a sum over keys is taken in the order
of vLLM's kernel for chains, whatever number of rows that one keeps."""


class KeyDecays(NamedTuple):
    """What decays the columns of a head's state, and how much of a row's value enters it.

    Attributes:
        decays: ``[num_rows, heads, K]``, before the activation; contiguous within a row.
        betas: ``[num_rows, heads]``, before the sigmoid; heads contiguous.
        log_rates: f32 ``[heads]``, logarithms of the rates of decay.
        decay_bias: f32 ``[heads * K]``, added to ``decays``.
        lower_bound: of the logarithm of a decay, negative: decays are
            ``exp(lower_bound * sigmoid(rate * x))``. None for ``exp(-rate * softplus(x))``.
    """

    decays: torch.Tensor
    betas: torch.Tensor
    log_rates: torch.Tensor
    decay_bias: torch.Tensor
    lower_bound: float | None


@triton.jit
def key_decay(x, rate, lower_bound, BOUNDED: tl.constexpr):
    """Logarithms of a row's decays.

    Args:
        x: f32, the decays with their bias, before the activation.
        rate: the head's rate of decay.
        lower_bound: as in `KeyDecays`; any number without one.
        BOUNDED: whether there is one.
    """
    return lower_bound * tl.sigmoid(rate * x) if BOUNDED else -rate * softplus(x)


@triton.jit
def key_ruled(state, key, value, decay, beta):
    """The state behind a row.

    Args:
        state: f32 ``[V, K]``, before it.
        key: f32 ``[K]``, of length 1.
        value: f32 ``[V]``.
        decay: f32 ``[K]``, as of `key_decay`.
        beta: the share of the value that enters.
    """
    state *= tl.exp(decay[None, :])
    return replaced(state, key, value, beta)


@Kernel
@triton.jit
def _tree_key_decays_kernel(
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
    lower_bound,
    row_stride,
    decay_stride,
    beta_stride,
    block_stride,
    column_stride,
    output_stride,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BOUNDED: tl.constexpr,
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
    rate = tl.exp(tl.load(log_rates + head).to(tl.float32))
    shift = tl.load(decay_bias + head * KEY + key, mask=is_key, other=0).to(tl.float32)
    rows += first * row_stride
    decays += first * decay_stride + head * KEY + key
    betas += first * beta_stride + head
    outputs += first * output_stride + head * VALUE + value
    parents += first
    state = tl.load(states + before * block_stride + place, mask=both, other=0).to(tl.float32)
    for row in range(0, num_rows):
        parent = tl.load(parents + row)
        state = continued(state, row, parent, states, columns, block_stride, place, both)
        vectors = rows + row * row_stride
        q = tl.load(vectors + head * KEY + key, mask=is_key, other=0).to(tl.float32)
        vectors += HEADS * KEY
        k = tl.load(vectors + head * KEY + key, mask=is_key, other=0).to(tl.float32)
        vectors += HEADS * KEY
        v = tl.load(vectors + head * VALUE + value, mask=is_value, other=0).to(tl.float32)
        q = q / tl.sqrt(tl.sum(q * q) + 1e-6) * scale
        k = k / tl.sqrt(tl.sum(k * k) + 1e-6)
        x = tl.load(decays + row * decay_stride, mask=is_key, other=0).to(tl.float32) + shift
        decay = key_decay(x, rate, lower_bound, BOUNDED)
        beta = tl.sigmoid(tl.load(betas + row * beta_stride).to(tl.float32))
        state = key_ruled(state, k, v, decay, beta)
        tl.store(outputs + row * output_stride, tl.sum(state * q[None, :], 1), mask=is_value)
        keep(state, row, states, columns, block_stride, place, both)


def tree_key_decays(
    rows: torch.Tensor,
    gates: KeyDecays,
    states: torch.Tensor,
    which: RecurrentRows,
    outputs: torch.Tensor,
) -> None:
    """Run the rows of trees: each continues its parent's state and leaves its own in its column.

    The root continues the last accepted row's state. The arithmetic is that of vLLM's
    ``fused_recurrent_kda``, in the same order, so that a chain's rows have the same bits. Where a
    row's parent is not the row before, the parent's state is read back from its column, rounded to
    the states' dtype.

    Args:
        rows: ``[num_rows, 2 * heads * K + heads * V]``, queries, keys and values of the heads
            behind each other, features contiguous, request after request.
        gates: decays and betas of the rows.
        states: ``[num_blocks, heads, V, K]``, contiguous but for the first stride.
        which: which row continues which, and the columns.
        outputs: ``[num_rows, heads, V]``, receives the result; heads contiguous.

    Raises:
        ValueError: if the states or the outputs are not contiguous as they have to be.
    """
    _, heads, value, key = states.shape
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    values = min(_MAX_VALUES, next_power_of_2(value))
    _tree_key_decays_kernel[(cdiv(value, values), which.num_reqs * heads)](
        rows,
        gates.decays,
        gates.betas,
        gates.log_rates,
        gates.decay_bias,
        states,
        which.columns,
        which.num_accepted,
        which.query_start_loc,
        which.parents,
        outputs,
        key**-0.5,
        0.0 if gates.lower_bound is None else gates.lower_bound,
        rows.stride(0),
        gates.decays.stride(0),
        gates.betas.stride(0),
        states.stride(0),
        which.columns.stride(0),
        outputs.stride(0),
        HEADS=heads,
        KEY=key,
        VALUE=value,
        KEYS=next_power_of_2(key),
        VALUES=values,
        BOUNDED=gates.lower_bound is not None,
        num_warps=1,
    )
