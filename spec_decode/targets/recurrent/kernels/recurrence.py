"""Convolution and recurrences over trees, a row after another: each row's state is written."""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    Gates,
    RecurrentRows,
    arguments_of,
    gated,
    of_length_one,
    places_of,
    rate_of,
    request_of,
    require_contiguous,
    stepped,
    tile_of,
)

_MAX_FEATURES, _MAX_TILE = 256, 4096
"""Features of a program, and rows times features."""


@Kernel
@triton.jit
def _tree_conv_kernel(
    inputs, weights, bias, windows, columns, num_accepted, query_start_loc, parents, outputs, dim,
    input_stride, weight_stride, block_stride, token_stride, feature_stride, column_stride,
    output_stride,
    WIDTH: tl.constexpr, SILU: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0)
    first = tl.load(query_start_loc + req).to(tl.int64)
    num_rows = tl.load(query_start_loc + req + 1) - first
    block = tl.load(columns + req * column_stride).to(tl.int64)
    # Block 0 is vLLM's null block: padding of a graph.
    if (block <= 0) | (num_rows <= 0):
        return
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    row = tl.arange(0, ROWS)
    is_feature, is_row = feature < dim, row < num_rows
    inside = is_row[:, None] & is_feature[None, :]
    inputs += first * input_stride + feature
    outputs += first * output_stride + feature
    window = windows + block * block_stride + feature * feature_stride
    # The newest input before the rows lies WIDTH - 2 behind the offset of those that count.
    offset = tl.load(num_accepted + req).to(tl.int64) - 1
    newest = offset + WIDTH - 2
    total = tl.zeros([ROWS, FEATURES], tl.float32)
    if bias is not None:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    # Oldest first, as a chain's kernel adds them.
    for place in tl.static_range(WIDTH):
        source = row.to(tl.int64)
        for _ in tl.static_range(WIDTH - 1 - place):
            before = source >= 0
            parent = tl.load(parents + first + source, mask=is_row & before, other=0)
            source = tl.where(before, parent.to(tl.int64), source - 1)
        line = source[:, None]
        own = tl.load(inputs[None, :] + line * input_stride, mask=inside & (line >= 0), other=0.0)
        old = tl.load(
            window[None, :] + (newest + 1 + line) * token_stride,
            mask=inside & (line < 0),
            other=0.0,
        )
        weight = tl.load(weights + feature * weight_stride + place, mask=is_feature, other=0.0)
        total += tl.where(line >= 0, own, old) * weight[None, :]
    if SILU:
        total = total / (1 + tl.exp(-total))
    tl.store(outputs[None, :] + row[:, None] * output_stride, total, mask=inside)
    # The window becomes the newest WIDTH - 2 inputs before the rows, then the rows' own.
    for place in tl.static_range(WIDTH - 2):
        tl.debug_barrier()
        kept = tl.load(window + (offset + 1 + place) * token_stride, mask=is_feature, other=0.0)
        tl.debug_barrier()
        tl.store(window + place * token_stride, kept, mask=is_feature)
    tl.debug_barrier()
    kept = tl.load(inputs[None, :] + row[:, None] * input_stride, mask=inside, other=0.0)
    behind = (WIDTH - 2 + row).to(tl.int64)[:, None]
    tl.store(window[None, :] + behind * token_stride, kept, mask=inside)


def tree_conv(
    inputs: torch.Tensor, windows: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None,
    rows: RecurrentRows, *, silu: bool, outputs: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Convolve each row with its ``width - 1`` nearest ancestors, and keep the rows' inputs.

    Before the root come the inputs that the window holds. A window is left as vLLM's kernel for
    chains leaves it: ``width - 2`` inputs from before the rows, then the inputs of all rows.

    Args:
        inputs: ``[num_rows, dim]``, features contiguous, request after request.
        windows: ``[num_blocks, dim, >= width - 2 + rows of a request]``, any strides. A request's
            window is in the block of its first column.
        weights: ``[dim, width]``, contiguous in its width, oldest input first; `bias` is ``[dim]``.
        silu: whether ``x * sigmoid(x)`` follows.
        outputs: ``[num_rows, dim]``, receives the result; rows of no request stay as they are. None
            makes one of the inputs' dtype, with zeros in such rows.
    """
    dim, width = weights.shape
    given = inputs.to(windows.dtype)
    if outputs is None:
        outputs = torch.zeros(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    if rows.num_reqs == 0:
        return outputs
    rows_padded = next_power_of_2(rows.columns.shape[1])
    features = min(max(_MAX_TILE // rows_padded, 1), _MAX_FEATURES, next_power_of_2(dim))
    _tree_conv_kernel[(rows.num_reqs, cdiv(dim, features))](
        given, weights, bias, windows, rows.columns, rows.num_accepted, rows.query_start_loc,
        rows.parents, outputs, dim,
        given.stride(0), weights.stride(0), windows.stride(0), windows.stride(2), windows.stride(1),
        rows.columns.stride(0), outputs.stride(0),
        WIDTH=width, SILU=silu, FEATURES=features, ROWS=rows_padded, num_warps=4,
    )  # fmt: skip
    return outputs


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
    rows, decays, betas, rates, bias, skips, states, columns, num_accepted, query_start_loc,
    parents, outputs, scale, lower_bound,
    row_stride, decay_stride, beta_stride, block_stride, column_stride, output_stride,
    DECAY: tl.constexpr, BOUNDED: tl.constexpr, GROUPS: tl.constexpr, HEADS: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
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
    ``selective_state_update``, in the same order, so that a chain's rows have the same bits. A
    parent that is not the row before is read back from its column, in the states' dtype.

    Args:
        rows: ``[num_rows, 2 * groups * K + heads * V]``, queries, keys and values of all heads
            behind each other (of Mamba-2 inputs, ``B`` and ``C``), features contiguous, by request.
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
