"""Recurrences over a tree as one chunk: each output without any node's state.

Let ``G`` be the sum of the logarithms of decays from the root to a node. With ``S`` as the state
before the tree, a node's state is ``exp(G) S`` and ``exp(G - G') u' k'`` of each node on its path,
itself included. With the gated delta rule, what node ``i`` writes under its key follows from its
ancestors ``j`` alone:

    u_i = beta_i (v_i - exp(G_i) S k_i - sum_j exp(G_i - G_j) (k_i . k_j) u_j)

as in a chunk of a chain (Yang et al. 2024, arXiv 2412.06464, section 3.3; vLLM's RFC #54080). The
system of equations is triangular. In round ``d`` all nodes of depth ``d`` become right.

With decays by key, ``G`` is a vector, with a number for each column of the state:

    u_i = beta_i (v_i - (k_i * exp(G_i)) S - sum_j (sum_c k_ic k_jc exp(G_ic - G_jc)) u_j)

(Kimi Team 2025, arXiv 2510.26692, section 3). Kernels for chains take ``exp(G_i - G_r)`` and
``exp(G_r - G_j)`` apart, with a node ``r`` between both. Branches of a tree have no such node in
common, and with another one the second power overflows. So no difference of two sums is formed
here: each node walks up to the root, all nodes at a time, and adds the decays on its way. No power
exceeds 1, and small sums keep their digits behind large ones.

With Mamba-2 nothing has to be solved (Dao and Gu 2024, arXiv 2405.21060, section 6):

    o_i = exp(G_i) S C_i + sum_j exp(G_i - G_j) (B_j . C_i) step_j x_j + D x_i
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    Gates,
    KeptRows,
    RecurrentRows,
    arguments_of,
    gated,
    log_decay,
    numbers_of,
    places_of,
    rate_of,
    request_of,
    require_contiguous,
)

_SCALAR = tl.constexpr(int(Decay.SCALAR))
_BY_KEY = tl.constexpr(int(Decay.BY_KEY))
_SELECTIVE = tl.constexpr(int(Decay.SELECTIVE))

_PART = 32
"""Columns of a state that a program multiplies at a time; for more it lacks registers."""

_LEAST = 16
"""Rows, columns and terms of a product of tensor cores, at least."""

_MAX_VALUES = 32
"""Rows of a head's state that a program reads."""


@triton.jit
def product(left, right):
    """A product of f32 matrices, as exact as f32 on tensor cores too."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def continuing(masks, line, row, inside):
    """Whether each row of a request continues each other one, or is it, by the bits of `masks`."""
    bits = tl.load(masks + line, mask=inside, other=0)
    return ((bits[:, None] >> row[None, :].to(tl.int64)) & 1) != 0


@triton.jit
def decayed(continues, decay):
    """Logarithms of decays from the root ``[rows]``, and decays between rows ``[rows, rows]``. Rows
    that a row does not continue have no share."""
    total = tl.sum(tl.where(continues, decay[None, :], 0.0), 1)
    # From a node to one that continues it there are decays alone, so that no power overflows.
    between = tl.where(continues, total[:, None] - total[None, :], 0)
    return total, tl.where(continues, tl.exp(between), 0)


@triton.jit
def solved(given, ahead, depth):
    """What each row writes into the state: what it is given, less what its ancestors have written.
    A row follows its ancestors, so that ``(1 + ahead) x = given`` has a lower triangle, and as many
    rounds as the tree is deep solve it exactly."""
    written = given
    for _ in range(1, depth):
        written = given - product(ahead, written)
    return written


def _chunk_sizes(value: int, max_rows: int) -> dict[str, int]:
    """Constants and warps of a kernel whose heads have states of `value` rows."""
    rows = max(_LEAST, next_power_of_2(max_rows))
    return {
        "PART": _PART,
        "VALUES": min(_MAX_VALUES, max(_LEAST, next_power_of_2(value))),
        "ROWS": rows,
        "num_warps": 4 if rows <= 32 else 8,
    }


@Kernel
@triton.jit
def _tree_chunk_kernel(
    rows, decays, betas, rates, bias, skips, states, columns, num_accepted, query_start_loc,
    parents, masks, gates, outputs, scale, lower_bound,
    row_stride, decay_stride, beta_stride, block_stride, column_stride, output_stride,
    DECAY: tl.constexpr, BOUNDED: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, NUMBERS: tl.constexpr, PART: tl.constexpr,
    VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
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
    continues = continuing(masks, line, row, inside)
    depth = tl.max(tl.sum(continues.to(tl.int32), 1), 0)
    is_self = row[:, None] == row[None, :]
    # Gates, as the kernel that writes states computes them. The path's go into the state later.
    rate = rate_of(rates, head, DECAY)
    beta = None
    if DECAY != _SELECTIVE:
        beta = tl.load(betas + line * beta_stride + head, mask=inside, other=0).to(tl.float32)
    if DECAY == _BY_KEY:
        parent = tl.load(parents + line, mask=inside, other=-1)
        share = tl.where(inside, tl.sigmoid(beta), 0.0)
        tl.store(gates + line * (NUMBERS * HEADS) + HEADS * KEY + head, share, mask=inside)
        gates += head * KEY
        decays += head * KEY + line[:, None] * decay_stride
        # All programs of a head store the logarithms of its decays by key alike.
        for start in range(0, KEY, PART):
            key = start + tl.arange(0, PART)
            is_key = key < KEY
            both = inside[:, None] & is_key[None, :]
            x = tl.load(decays + key[None, :], mask=both, other=0).to(tl.float32)
            x += tl.load(bias + head * KEY + key, mask=is_key, other=0).to(tl.float32)[None, :]
            decay = log_decay(x, rate, lower_bound, BOUNDED)
            tl.store(gates + line[:, None] * (NUMBERS * HEADS) + key[None, :], decay, mask=both)
        # Other threads of this program have stored what this one loads.
        tl.debug_barrier()
    else:
        x = tl.load(decays + line * decay_stride + head, mask=inside, other=0).to(tl.float32)
        if tl.program_id(0) == 0:
            own = gates + line * (NUMBERS * HEADS) + head
            tl.store(own, x, mask=inside)
            if DECAY == _SCALAR:
                tl.store(own + HEADS, beta, mask=inside)
        x += tl.load(bias + head).to(tl.float32)
        decay, share = gated(x, beta, rate, lower_bound, DECAY, BOUNDED)
        if DECAY == _SCALAR:
            share = tl.where(inside, share, 0.0)
        total, between = decayed(continues, decay)
        kept = tl.exp(total)
    to_query, to_key, to_value = places_of(head, DECAY, GROUPS, HEADS, KEY, VALUE)
    vectors = rows + line[:, None] * row_stride
    at_state = states + before * block_stride + (head * VALUE + value[None, :]) * KEY
    # Products with keys and queries as they are; their lengths divide the sums.
    k_by_k, q_by_k = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
    k_by_s, q_by_s = tl.zeros([ROWS, VALUES], tl.float32), tl.zeros([ROWS, VALUES], tl.float32)
    k_square, q_square = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, KEY, PART):
        key = start + tl.arange(0, PART)
        is_key = key < KEY
        both = inside[:, None] & is_key[None, :]
        q = tl.load(vectors + to_query + key[None, :], mask=both, other=0).to(tl.float32)
        k = tl.load(vectors + to_key + key[None, :], mask=both, other=0).to(tl.float32)
        if DECAY != _SELECTIVE:
            k_square += tl.sum(k * k, 1)
            q_square += tl.sum(q * q, 1)
        if DECAY == _BY_KEY:
            at_gate = gates + line[:, None] * (NUMBERS * HEADS) + key[None, :]
            passed = tl.load(at_gate, mask=both, other=0)
            q_by_k += tl.where(is_self, tl.sum(q * k, 1)[:, None], 0.0)
            ancestor = parent
            for _ in range(1, depth):
                exists = ancestor >= 0
                at = first + tl.maximum(ancestor, 0)
                both = exists[:, None] & is_key[None, :]
                at_key = rows + at[:, None] * row_stride + to_key + key[None, :]
                other = tl.load(at_key, mask=both, other=0).to(tl.float32) * tl.exp(passed)
                is_it = row[None, :] == ancestor[:, None]
                k_by_k += tl.where(is_it, tl.sum(k * other, 1)[:, None], 0.0)
                q_by_k += tl.where(is_it, tl.sum(q * other, 1)[:, None], 0.0)
                at_gate = gates + at[:, None] * (NUMBERS * HEADS) + key[None, :]
                passed += tl.load(at_gate, mask=both, other=0)
                ancestor = tl.load(parents + at, mask=exists, other=-1)
            passed = tl.exp(passed)
            k, q = k * passed, q * passed
        else:
            across = tl.trans(k)
            q_by_k += product(q, across)
            if DECAY == _SCALAR:
                k_by_k += product(k, across)
        both = is_key[:, None] & is_value[None, :]
        state = tl.load(at_state + key[:, None], mask=both, other=0).to(tl.float32)
        q_by_s += product(q, state)
        if DECAY != _SELECTIVE:
            k_by_s += product(k, state)
    both = inside[:, None] & is_value[None, :]
    v = tl.load(vectors + to_value + value[None, :], mask=both, other=0).to(tl.float32)
    if DECAY == _SELECTIVE:
        out = q_by_s * kept[:, None] + product(q_by_k * between * share[None, :], v)
        out += v * tl.load(skips + head).to(tl.float32)
    else:
        k_length = tl.rsqrt(k_square + 1e-6)
        q_length = tl.rsqrt(q_square + 1e-6) * scale
        k_share, q_share = k_length, q_length
        if DECAY == _SCALAR:
            k_by_k *= tl.where(is_self, 0.0, between)
            q_by_k *= between
            k_share, q_share = k_length * kept, q_length * kept
        ahead = k_by_k * (share * k_length)[:, None] * k_length[None, :]
        given = (v - k_by_s * k_share[:, None]) * share[:, None]
        written = solved(given, ahead, depth)
        reads = q_by_k * q_length[:, None] * k_length[None, :]
        out = q_by_s * q_share[:, None] + product(reads, written)
    outputs += line[:, None] * output_stride + head * VALUE + value[None, :]
    tl.store(outputs, out, mask=both)


def tree_chunk(
    rows: torch.Tensor, gates: Gates, states: torch.Tensor, which: RecurrentRows, kept: KeptRows,
    kept_gates: torch.Tensor, outputs: torch.Tensor, *, groups: int, max_rows: int,
) -> None:  # fmt: skip
    """Compute the outputs of the rows of trees, and write no state.

    The results are those of `tree_recurrence` but for rounding, as are arguments not listed here.
    `fold_states` continues each request's state along the path that is accepted. `kept`: the rows'
    ancestors, as `keep_rows` has noted them. `kept_gates`: f32 ``[>= num_rows, numbers, heads]``,
    contiguous, receives the gates as `LayerInputs` describes them. `max_rows`: most rows of a
    request, 64 at most."""
    require_contiguous(states, outputs)
    if which.num_reqs == 0:
        return
    given = arguments_of(rows, gates, states, which, outputs, groups)
    value, sizes = given["VALUE"], _chunk_sizes(given["VALUE"], max_rows)
    _tree_chunk_kernel[(cdiv(value, sizes["VALUES"]), which.num_reqs * given["HEADS"])](
        **given, masks=kept.masks, gates=kept_gates,
        NUMBERS=numbers_of(Decay(given["DECAY"]), given["KEY"]), **sizes,
    )  # fmt: skip
