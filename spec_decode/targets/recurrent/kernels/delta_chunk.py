"""The gated delta rule over a tree as one chunk: each output without any node's state.

Let ``G`` be the sum of the logarithms of decays from the root to a node. With ``S`` as the state
before the tree, a node's state is ``exp(G) S`` and ``exp(G - G') u' k'`` of each node on its path,
itself included. What node ``i`` writes under its key follows from its ancestors ``j`` alone:

    u_i = beta_i (v_i - exp(G_i) S k_i - sum_j exp(G_i - G_j) (k_i . k_j) u_j)

That is a chunk of a chain (Yang et al. 2024, arXiv 2412.06464, section 3.3) with the tree's order
in place of the chain's, as in vLLM's RFC #54080. As parents come before children, the system of
equations is triangular. It is solved a level at a time: in round ``d`` all nodes of depth ``d``
become right, so there are as many rounds as the tree is deep, each a product of matrices.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.listed_launch import Kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv
from vllm_graft.spec_decode.targets.recurrent.kernels.delta_rule import DeltaGates
from vllm_graft.spec_decode.targets.recurrent.kernels.node_state import (
    request_of,
    require_contiguous,
    softplus,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.tree_chunk import (
    chunk_sizes,
    continuing,
    decayed,
    product,
    solved,
)


@Kernel
@triton.jit
def _tree_delta_chunk_kernel(
    rows,
    decays,
    betas,
    log_rates,
    decay_bias,
    states,
    columns,
    num_accepted,
    query_start_loc,
    masks,
    gates,
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
    PART: tl.constexpr,
    VALUES: tl.constexpr,
    ROWS: tl.constexpr,
):
    req = tl.program_id(1) // VALUE_HEADS
    head = tl.program_id(1) % VALUE_HEADS
    key_head = head // (VALUE_HEADS // KEY_HEADS)
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
    # Gates, as the kernel that writes states computes them. The path's go into the state later.
    decay = tl.load(decays + line * decay_stride + head, mask=inside, other=0).to(tl.float32)
    beta = tl.load(betas + line * beta_stride + head, mask=inside, other=0).to(tl.float32)
    if tl.program_id(0) == 0:
        tl.store(gates + line * (2 * VALUE_HEADS) + head, decay, mask=inside)
        tl.store(gates + line * (2 * VALUE_HEADS) + VALUE_HEADS + head, beta, mask=inside)
    x = decay + tl.load(decay_bias + head).to(tl.float32)
    rate = tl.exp(tl.load(log_rates + head).to(tl.float32))
    x = -rate * softplus(x)
    beta = tl.where(inside, tl.sigmoid(beta), 0.0)
    total, share = decayed(continues, x)
    kept = tl.exp(total)
    vectors = rows + line[:, None] * row_stride
    columns_of_keys = tl.arange(0, PART)
    at_state = states + before * block_stride + (head * VALUE + value[None, :]) * KEY
    # Products with keys and queries as they are; their lengths divide the sums.
    k_by_k, q_by_k = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    k_by_s, q_by_s = tl.zeros([ROWS, VALUES], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)
    k_square, q_square = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, KEY, PART):
        key = start + columns_of_keys
        both = inside[:, None] & (key < KEY)[None, :]
        at_key = vectors + key_head * KEY + key[None, :]
        q = tl.load(at_key, mask=both, other=0).to(tl.float32)
        k = tl.load(at_key + KEY_HEADS * KEY, mask=both, other=0).to(tl.float32)
        both = (key < KEY)[:, None] & is_value[None, :]
        state = tl.load(at_state + key[:, None], mask=both, other=0).to(tl.float32)
        across = tl.trans(k)
        k_by_k += product(k, across)
        q_by_k += product(q, across)
        k_by_s += product(k, state)
        q_by_s += product(q, state)
        k_square += tl.sum(k * k, 1)
        q_square += tl.sum(q * q, 1)
    k_length = tl.rsqrt(k_square + 1e-6)
    q_length = tl.rsqrt(q_square + 1e-6) * scale
    at_value = vectors + 2 * KEY_HEADS * KEY + head * VALUE + value[None, :]
    v = tl.load(at_value, mask=inside[:, None] & is_value[None, :], other=0).to(tl.float32)
    before_it = tl.where(row[:, None] == row[None, :], 0.0, share)
    ahead = k_by_k * before_it * (beta * k_length)[:, None] * k_length[None, :]
    given = (v - k_by_s * (k_length * kept)[:, None]) * beta[:, None]
    written = solved(given, ahead, tl.max(tl.sum(continues.to(tl.int32), 1), 0))
    reads = q_by_k * share * q_length[:, None] * k_length[None, :]
    out = q_by_s * (q_length * kept)[:, None] + product(reads, written)
    outputs += line[:, None] * output_stride + head * VALUE + value[None, :]
    tl.store(outputs, out, mask=inside[:, None] & is_value[None, :])


def tree_delta_chunk(
    rows: torch.Tensor,
    gates: DeltaGates,
    states: torch.Tensor,
    which: RecurrentRows,
    kept: KeptRows,
    kept_gates: torch.Tensor,
    outputs: torch.Tensor,
    *,
    key_heads: int,
    max_rows: int,
) -> None:
    """Compute the outputs of the rows of trees, and write no state.

    The results are those of `tree_delta_rule` but for rounding. The state of each request stays as
    it is: `fold_states` continues it along the path that is accepted.

    Args:
        rows: ``[num_rows, 2 * key_heads * K + value_heads * V]``, queries, keys and values of the
            heads behind each other, features contiguous, request after request.
        gates: decays and betas of the rows.
        states: ``[num_blocks, value_heads, V, K]``, contiguous but for the first stride.
        which: the columns, and the rows of the requests.
        kept: the rows' ancestors, as `keep_rows` has noted them.
        kept_gates: f32 ``[>= num_rows, 2, value_heads]``, receives decays and betas as they are.
        outputs: ``[num_rows, value_heads, V]``, receives the result; heads contiguous.
        key_heads: heads of queries and keys, a divisor of ``value_heads``.
        max_rows: most rows of a request, 64 at most.

    Raises:
        ValueError: if the states or the outputs are not contiguous as they have to be.
    """
    _, value_heads, value, key = states.shape
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    sizes = chunk_sizes(value, max_rows)
    decays, betas = gates.decays, gates.betas
    _tree_delta_chunk_kernel[(cdiv(value, sizes["VALUES"]), which.num_reqs * value_heads)](
        rows,
        decays,
        betas,
        gates.log_rates,
        gates.decay_bias,
        states,
        which.columns,
        which.num_accepted,
        which.query_start_loc,
        kept.masks,
        kept_gates,
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
        **sizes,
    )
