"""The selective state update of Mamba-2 over a tree as one chunk: no node's state is written.

As in `delta_chunk`, with ``G`` the sum of the logarithms of decays from the root to a node. What a
node writes does not depend on its ancestors here, so there are no equations to be solved:

    o_i = exp(G_i) S C_i + sum_j exp(G_i - G_j) (B_j . C_i) step_j x_j + D x_i

over the nodes ``j`` of its path, itself included (Dao and Gu 2024, arXiv 2405.21060, section 6).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.targets.recurrent.kernels.node_state import (
    request_of,
    require_contiguous,
    softplus,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.selective_state import SelectiveGates
from vllm_graft.spec_decode.targets.recurrent.kernels.tree_chunk import (
    chunk_sizes,
    continuing,
    decayed,
    product,
)


@Kernel
@triton.jit
def _tree_selective_chunk_kernel(
    rows,
    steps,
    rates,
    step_bias,
    skips,
    states,
    columns,
    num_accepted,
    query_start_loc,
    masks,
    gates,
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
    PART: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
):
    req = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    group = head // (HEADS // GROUPS)
    first, num_rows, columns, before = request_of(
        req, query_start_loc, num_accepted, columns, column_stride
    )
    if before <= 0:
        return
    row = tl.arange(0, ROWS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside, is_value = row < num_rows, value < VALUE
    line = first + row
    continues = continuing(masks, line, row, inside)
    step = tl.load(steps + line * step_stride + head, mask=inside, other=0).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(gates + line * HEADS + head, step, mask=inside)
    step += tl.load(step_bias + head).to(tl.float32)
    step = softplus(step)
    decay = tl.load(rates + head).to(tl.float32) * step
    total, share = decayed(continues, decay)
    vectors = rows + line[:, None] * row_stride
    at_group = vectors + HEADS * VALUE + group * STATE
    at_state = states + before * block_stride + (head * VALUE + value[None, :]) * STATE
    c_by_b = tl.zeros([ROWS, ROWS], tl.float32)
    c_by_s = tl.zeros([ROWS, VALUES], tl.float32)
    for start in range(0, STATE, PART):
        number = start + tl.arange(0, PART)
        both = inside[:, None] & (number < STATE)[None, :]
        b = tl.load(at_group + number[None, :], mask=both, other=0).to(tl.float32)
        c = tl.load(at_group + GROUPS * STATE + number[None, :], mask=both, other=0).to(tl.float32)
        both = (number < STATE)[:, None] & is_value[None, :]
        state = tl.load(at_state + number[:, None], mask=both, other=0).to(tl.float32)
        c_by_b += product(c, tl.trans(b))
        c_by_s += product(c, state)
    both = inside[:, None] & is_value[None, :]
    x = tl.load(vectors + head * VALUE + value[None, :], mask=both, other=0).to(tl.float32)
    out = c_by_s * tl.exp(total)[:, None] + product(c_by_b * share * step[None, :], x)
    out += x * tl.load(skips + head).to(tl.float32)
    outputs += line[:, None] * output_stride + head * VALUE + value[None, :]
    tl.store(outputs, out, mask=both)


def tree_selective_chunk(
    rows: torch.Tensor,
    gates: SelectiveGates,
    states: torch.Tensor,
    which: RecurrentRows,
    kept: KeptRows,
    kept_gates: torch.Tensor,
    outputs: torch.Tensor,
    *,
    groups: int,
    max_rows: int,
) -> None:
    """Compute the outputs of the rows of trees, and write no state.

    The results are those of `tree_selective_update` but for rounding. The state of each request
    stays as it is: `fold_states` continues it along the path that is accepted.

    Args:
        rows: ``[num_rows, heads * P + 2 * groups * N]``, inputs of all heads, then ``B`` and ``C``
            of all groups, features contiguous, request after request.
        gates: steps of the rows, and what each head does with them.
        states: ``[num_blocks, heads, P, N]``, contiguous but for the first stride.
        which: the columns, and the rows of the requests.
        kept: the rows' ancestors, as `keep_rows` has noted them.
        kept_gates: f32 ``[>= num_rows, 1, heads]``, receives the steps as they are.
        outputs: ``[num_rows, heads, P]``, receives the result; heads contiguous.
        groups: groups of ``B`` and ``C``, a divisor of ``heads``.
        max_rows: most rows of a request, 64 at most.

    Raises:
        ValueError: if the states or the outputs are not contiguous as they have to be.
    """
    _, heads, value, size = states.shape
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    sizes = chunk_sizes(value, max_rows)
    _tree_selective_chunk_kernel[(cdiv(value, sizes["VALUES"]), which.num_reqs * heads)](
        rows,
        gates.steps,
        gates.rates,
        gates.step_bias,
        gates.skips,
        states,
        which.columns,
        which.num_accepted,
        which.query_start_loc,
        kept.masks,
        kept_gates,
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
        **sizes,
    )
