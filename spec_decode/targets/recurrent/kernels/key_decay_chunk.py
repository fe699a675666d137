"""The delta rule with a decay per key over a tree as one chunk: no node's state is written.

As in `delta_chunk`, but the sum ``G`` of the logarithms of decays from the root to a node is a
vector, with a number for each column of the state. So a decay enters each product of a node's key
(or query) and an ancestor's key, column by column:

    u_i = beta_i (v_i - (k_i * exp(G_i)) S - sum_j (sum_c k_ic k_jc exp(G_ic - G_jc)) u_j)

over the ancestors ``j`` of ``i``, as in a chunk of a chain (Kimi Team 2025, arXiv 2510.26692,
section 3). Kernels for chains take ``exp(G_i - G_r)`` and ``exp(G_r - G_j)`` apart, with a node
``r`` between both, and multiply matrices. Branches of a tree have no such node in common, and
``exp(G_r - G_j)`` with another node overflows, as do decays of 20 per step beyond five steps. So no
difference of two sums is formed here: each node walks up to the root, all nodes at a time, and adds
the decays on its way. After ``d`` steps its sum is ``G_i - G_j`` for its ``d``-th ancestor ``j``,
made of negative numbers alone: no power exceeds 1, and small sums keep their digits behind large
ones. That takes as many rounds as the tree is deep, each of ``nodes * K`` powers and products.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.targets.recurrent.kernels.key_decays import KeyDecays, key_decay
from vllm_graft.spec_decode.targets.recurrent.kernels.node_state import (
    request_of,
    require_contiguous,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.tree_chunk import (
    chunk_sizes,
    continuing,
    product,
    solved,
)


@Kernel
@triton.jit
def _tree_key_decay_chunk_kernel(
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
    masks,
    gates,
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
    PART: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    req = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    first, num_rows, columns, before = request_of(
        req, query_start_loc, num_accepted, columns, column_stride
    )
    if before <= 0:
        return
    row = tl.arange(0, ROWS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    inside, is_value = row < num_rows, value < VALUE
    line = first + row
    depth = tl.max(tl.sum(continuing(masks, line, row, inside).to(tl.int32), 1), 0)
    parent = tl.load(parents + line, mask=inside, other=-1)
    is_self = row[:, None] == row[None, :]
    # Gates as they count. The walk below reads them again and again, the path's go into the state
    # later. Programs of a head write the same bits to the same places.
    part = tl.arange(0, PART)
    rate = tl.exp(tl.load(log_rates + head).to(tl.float32))
    beta = tl.load(betas + line * beta_stride + head, mask=inside, other=0).to(tl.float32)
    beta = tl.where(inside, tl.sigmoid(beta), 0.0)
    tl.store(gates + line * (HEADS * (KEY + 1)) + HEADS * KEY + head, beta, mask=inside)
    gates += head * KEY
    for start in range(0, KEY, PART):
        key = start + part
        is_key = key < KEY
        both = inside[:, None] & is_key[None, :]
        at_decay = decays + line[:, None] * decay_stride + head * KEY + key[None, :]
        x = tl.load(at_decay, mask=both, other=0).to(tl.float32)
        x += tl.load(decay_bias + head * KEY + key, mask=is_key, other=0).to(tl.float32)[None, :]
        decay = key_decay(x, rate, lower_bound, BOUNDED)
        tl.store(gates + line[:, None] * (HEADS * (KEY + 1)) + key[None, :], decay, mask=both)
    # Other threads of this program have stored what this one loads.
    tl.debug_barrier()
    queries = rows + head * KEY
    keys = rows + (HEADS + head) * KEY
    at_state = states + before * block_stride + (head * VALUE + value[None, :]) * KEY
    # Products with keys and queries as they are; their lengths divide the sums.
    k_by_k, q_by_k = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    k_by_s, q_by_s = tl.zeros([ROWS, VALUES], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)
    k_square, q_square = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, KEY, PART):
        key = start + part
        is_key = key < KEY
        both = inside[:, None] & is_key[None, :]
        q = tl.load(queries + line[:, None] * row_stride + key[None, :], mask=both, other=0)
        k = tl.load(keys + line[:, None] * row_stride + key[None, :], mask=both, other=0)
        q, k = q.to(tl.float32), k.to(tl.float32)
        at_gate = gates + line[:, None] * (HEADS * (KEY + 1)) + key[None, :]
        total = tl.load(at_gate, mask=both, other=0)
        k_square += tl.sum(k * k, 1)
        q_square += tl.sum(q * q, 1)
        q_by_k += tl.where(is_self, tl.sum(q * k, 1)[:, None], 0.0)
        ancestor = parent
        for _ in range(1, depth):
            exists = ancestor >= 0
            at = first + tl.maximum(ancestor, 0)
            both = exists[:, None] & is_key[None, :]
            other = tl.load(keys + at[:, None] * row_stride + key[None, :], mask=both, other=0)
            other = other.to(tl.float32) * tl.exp(total)
            is_it = row[None, :] == ancestor[:, None]
            k_by_k += tl.where(is_it, tl.sum(k * other, 1)[:, None], 0.0)
            q_by_k += tl.where(is_it, tl.sum(q * other, 1)[:, None], 0.0)
            at_gate = gates + at[:, None] * (HEADS * (KEY + 1)) + key[None, :]
            total += tl.load(at_gate, mask=both, other=0)
            ancestor = tl.load(parents + at, mask=exists, other=-1)
        kept = tl.exp(total)
        both = is_key[:, None] & is_value[None, :]
        state = tl.load(at_state + key[:, None], mask=both, other=0).to(tl.float32)
        k_by_s += product(k * kept, state)
        q_by_s += product(q * kept, state)
    k_length = tl.rsqrt(k_square + 1e-6)
    q_length = tl.rsqrt(q_square + 1e-6) * scale
    at_value = rows + line[:, None] * row_stride + 2 * HEADS * KEY + head * VALUE + value[None, :]
    both = inside[:, None] & is_value[None, :]
    v = tl.load(at_value, mask=both, other=0).to(tl.float32)
    ahead = k_by_k * (beta * k_length)[:, None] * k_length[None, :]
    given = (v - k_by_s * k_length[:, None]) * beta[:, None]
    written = solved(given, ahead, depth)
    reads = q_by_k * q_length[:, None] * k_length[None, :]
    out = q_by_s * q_length[:, None] + product(reads, written)
    outputs += line[:, None] * output_stride + head * VALUE + value[None, :]
    tl.store(outputs, out, mask=both)


def tree_key_decay_chunk(
    rows: torch.Tensor,
    gates: KeyDecays,
    states: torch.Tensor,
    which: RecurrentRows,
    kept: KeptRows,
    kept_gates: torch.Tensor,
    outputs: torch.Tensor,
    *,
    max_rows: int,
) -> None:
    """Compute the outputs of the rows of trees, and write no state.

    The results are those of `tree_key_decays` but for rounding. The state of each request stays as
    it is: `fold_states` continues it along the path that is accepted.

    Args:
        rows: ``[num_rows, 2 * heads * K + heads * V]``, queries, keys and values of the heads
            behind each other, features contiguous, request after request.
        gates: decays and betas of the rows.
        states: ``[num_blocks, heads, V, K]``, contiguous but for the first stride.
        which: which row continues which, and the columns.
        kept: the rows' ancestors, as `keep_rows` has noted them.
        kept_gates: f32 ``[>= num_rows, K + 1, heads]``, contiguous; receives in a row's memory
            ``heads * K`` logarithms of decays, then ``heads`` betas behind the sigmoid.
        outputs: ``[num_rows, heads, V]``, receives the result; heads contiguous.
        max_rows: most rows of a request, 64 at most.

    Raises:
        ValueError: if the states or the outputs are not contiguous as they have to be.
    """
    _, heads, value, key = states.shape
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    sizes = chunk_sizes(value, max_rows)
    _tree_key_decay_chunk_kernel[(cdiv(value, sizes["VALUES"]), which.num_reqs * heads)](
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
        kept.masks,
        kept_gates,
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
        BOUNDED=gates.lower_bound is not None,
        **sizes,
    )
