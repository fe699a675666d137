"""The selective state update of Mamba-2 over trees (Dao and Gu 2024, arXiv 2405.21060).

A head's state is a matrix ``[P, N]``. A row decays it by one number per head, adds the product of
its input ``x`` ``[P]`` and ``B`` ``[N]``, and reads it with ``C`` ``[N]``.
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
    request_of,
    require_contiguous,
    softplus,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

_MAX_VALUES = 32
"""Rows of a head's state that a program keeps."""


class SelectiveGates(NamedTuple):
    """What decays a head's state, and how much of a row's input enters it.

    Attributes:
        steps: ``[num_rows, heads]``, before ``softplus``.
        rates: f32 ``[heads]``, negative rates of decay (``A``).
        step_bias: ``[heads]``, added to ``steps``.
        skips: ``[heads]``, share of the input that is added to the output (``D``).
    """

    steps: torch.Tensor
    rates: torch.Tensor
    step_bias: torch.Tensor
    skips: torch.Tensor


@triton.jit
def selected(state, b, x, step, rate):
    """The state behind a row.

    Args:
        state: f32 ``[P, N]``, before it.
        b: f32 ``[N]``.
        x: f32 ``[P]``, the input.
        step: the row's step with its bias, before ``softplus``.
        rate: the head's negative rate of decay.
    """
    step = softplus(step)
    # By the power of two, as in vLLM's kernel for chains.
    decay = tl.exp2(1.4426950408889634 * (rate * step))
    return state * decay + (b * step)[None, :] * x[:, None]


@Kernel
@triton.jit
def _tree_selective_kernel(
    rows,
    steps,
    rates,
    step_bias,
    skips,
    states,
    columns,
    num_accepted,
    query_start_loc,
    parents,
    outputs,
    row_stride,
    step_stride,
    block_stride,
    column_stride,
    output_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE: tl.constexpr,
    STATE: tl.constexpr,
    VALUES: tl.constexpr,
    STATES: tl.constexpr,
):
    req = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    group = head // (HEADS // GROUPS)
    first, num_rows, columns, before = request_of(
        req, query_start_loc, num_accepted, columns, column_stride
    )
    if before <= 0:
        return
    number = tl.arange(0, STATES)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_number, is_value = number < STATE, value < VALUE
    both = is_value[:, None] & is_number[None, :]
    place = head * VALUE * STATE + value[:, None] * STATE + number[None, :]
    rate = tl.load(rates + head).to(tl.float32)
    shift = tl.load(step_bias + head).to(tl.float32)
    skip = tl.load(skips + head).to(tl.float32)
    rows += first * row_stride
    outputs += first * output_stride + head * VALUE + value
    parents += first
    state = tl.load(states + before * block_stride + place, mask=both, other=0).to(tl.float32)
    for row in range(0, num_rows):
        parent = tl.load(parents + row)
        state = continued(state, row, parent, states, columns, block_stride, place, both)
        vectors = rows + row * row_stride
        x = tl.load(vectors + head * VALUE + value, mask=is_value, other=0).to(tl.float32)
        vectors += HEADS * VALUE
        b = tl.load(vectors + group * STATE + number, mask=is_number, other=0).to(tl.float32)
        vectors += GROUPS * STATE
        c = tl.load(vectors + group * STATE + number, mask=is_number, other=0).to(tl.float32)
        step = tl.load(steps + (first + row) * step_stride + head).to(tl.float32) + shift
        state = selected(state, b, x, step, rate)
        keep(state, row, states, columns, block_stride, place, both)
        out = tl.sum(state * c[None, :], 1) + x * skip
        tl.store(outputs + row * output_stride, out, mask=is_value)


def tree_selective_update(
    rows: torch.Tensor,
    gates: SelectiveGates,
    states: torch.Tensor,
    which: RecurrentRows,
    outputs: torch.Tensor,
    *,
    groups: int,
) -> None:
    """Run the rows of trees: each continues its parent's state and leaves its own in its column.

    The root continues the last accepted row's state. The arithmetic is that of vLLM's
    ``selective_state_update``, in the same order. Where a row's parent is not the row before, the
    parent's state is read back from its column, rounded to the states' dtype.

    Args:
        rows: ``[num_rows, heads * P + 2 * groups * N]``, inputs of all heads, then ``B`` and ``C``
            of all groups, features contiguous, request after request.
        gates: steps of the rows, and what each head does with them.
        states: ``[num_blocks, heads, P, N]``, contiguous but for the first stride.
        which: which row continues which, and the columns.
        outputs: ``[num_rows, heads, P]``, receives the result; heads contiguous.
        groups: groups of ``B`` and ``C``, a divisor of ``heads``.

    Raises:
        ValueError: if the states or the outputs are not contiguous as they have to be.
    """
    _, heads, value, size = states.shape
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    values = min(_MAX_VALUES, next_power_of_2(value))
    _tree_selective_kernel[(cdiv(value, values), which.num_reqs * heads)](
        rows,
        gates.steps,
        gates.rates,
        gates.step_bias,
        gates.skips,
        states,
        which.columns,
        which.num_accepted,
        which.query_start_loc,
        which.parents,
        outputs,
        rows.stride(0),
        gates.steps.stride(0),
        states.stride(0),
        which.columns.stride(0),
        outputs.stride(0),
        HEADS=heads,
        GROUPS=groups,
        VALUE=value,
        STATE=size,
        VALUES=values,
        STATES=next_power_of_2(size),
        num_warps=4,
    )
