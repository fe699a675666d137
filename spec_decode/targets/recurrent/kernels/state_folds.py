"""Continues recurrent states along accepted paths, by the inputs that the paths' rows have left."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    KeptRows,
    LayerInputs,
    gated,
    numbers_of,
    of_length_one,
    places_of,
    rate_of,
    stepped,
    tile_of,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import columns_of

_TYPES = {
    None: None,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_BY_KEY = tl.constexpr(int(Decay.BY_KEY))
_SCALAR = tl.constexpr(int(Decay.SCALAR))
_SELECTIVE = tl.constexpr(int(Decay.SELECTIVE))
_ALIGNMENT = 16
"""Bytes. Where addresses are multiples of it the kernel is told so, as Triton tells vLLM's kernel
for chains: so both are compiled with the same order of sums."""


class FoldedLayer(NamedTuple):
    """A layer whose states are continued by kept inputs.

    Attributes:
        states: ``[num_blocks, value_heads, V, K]`` (of Mamba-2 ``[num_blocks, heads, P, N]``),
            contiguous but for the first stride.
        rates: ``[value_heads]``, of decay; of the gated delta rule their logarithms. None of Kimi
            delta attention, whose gates are kept as they count.
        bias: ``[value_heads]``, added to decays, or to the steps of Mamba-2; None likewise.
        groups: heads of keys, or groups of ``B`` and ``C``.
        blocks: as of `RecurrentCache`.
    """

    inputs: LayerInputs
    states: torch.Tensor
    rates: torch.Tensor | None
    bias: torch.Tensor | None
    groups: int
    blocks: torch.Tensor
    block_size: int
    decay: Decay


@dataclass(frozen=True)
class FoldTable:
    """Where the layers keep what their states are continued by, for one launch of all layers.

    It holds addresses, as `StateTable` does.

    Attributes:
        layers: i64 ``[num_layers, 6]``, addresses of states, of rows, of gates, of rates and of
            biases, and elements from a block of states to the next.
        tables: i64 ``[num_layers, 3]``, as in `StateTable`.
        shape: groups (heads of keys) and heads of values, and the two sizes of a state.
        row_stride: elements from a kept row to the next.
        dtypes: of states, rows, rates and biases; None of what there is none of.
        alignment: bytes that addresses of states are multiples of, as far as the kernel is told.
        by_prefix: as in `StateTable`; states that end a block are kept besides the last one.
    """

    layers: torch.Tensor
    tables: torch.Tensor
    decay: Decay
    shape: tuple[int, int, int, int]
    row_stride: int
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype | None]
    alignment: int
    by_prefix: bool

    @classmethod
    def build(cls, layers: Sequence[FoldedLayer], *, by_prefix: bool) -> Self:
        """Describe the layers, at least one, which must be alike in shapes and dtypes."""
        kinds = {
            (
                each.decay,
                (each.groups, *each.states.shape[1:]),
                each.inputs.rows.stride(0),
                (
                    each.states.dtype,
                    each.inputs.rows.dtype,
                    *(None if gate is None else gate.dtype for gate in (each.rates, each.bias)),
                ),
            )
            for each in layers
        }
        if len(kinds) != 1:
            raise ValueError(f"layers must be alike, got {kinds}")
        ((decay, shape, row_stride, dtypes),) = kinds
        numbers = [_addresses(each) for each in layers]
        size = dtypes[0].itemsize
        aligned = all(
            states % _ALIGNMENT == 0 and stride * size % _ALIGNMENT == 0
            for states, *_, stride in numbers
        )
        tables = [
            [each.blocks.data_ptr(), each.blocks.stride(0), each.block_size] for each in layers
        ]
        device = layers[0].states.device
        return cls(
            torch.tensor(numbers, device=device), torch.tensor(tables, device=device), decay, shape,
            row_stride, dtypes, _ALIGNMENT if aligned else size, by_prefix,
        )  # fmt: skip


def _addresses(layer: FoldedLayer) -> list[int]:
    tensors = (layer.states, *layer.inputs, layer.rates, layer.bias)
    addresses = (0 if each is None else each.data_ptr() for each in tensors)
    return [*addresses, layer.states.stride(0)]


@Kernel
@triton.jit
def _fold_states_kernel(
    layers, tables, firsts, accepted, query_start_loc, path, num_sampled, seq_lens,
    path_stride, row_stride,
    STATE: tl.constexpr, ROW: tl.constexpr, RATE: tl.constexpr, BIAS: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr, ALIGNED_UNITS: tl.constexpr, GROUPS: tl.constexpr,
    HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, BY_PREFIX: tl.constexpr, DECAY: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    req = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    layer = tl.program_id(2)
    place = tl.load(query_start_loc + req).to(tl.int64)
    num_rows = tl.load(query_start_loc + req + 1) - place
    if num_rows <= 0:
        return
    first = tl.load(firsts + place).to(tl.int64)
    if first < 0:
        return
    columns = columns_of(tables, layer, req, seq_lens, BY_PREFIX)
    before = tl.load(columns + tl.load(accepted + place) - 1).to(tl.int64)
    if before <= 0:
        return
    layers += layer * 6
    states = tl.multiple_of(tl.load(layers).to(tl.pointer_type(STATE)), ALIGNED_BYTES)
    rows = tl.load(layers + 1).to(tl.pointer_type(ROW))
    gates = tl.load(layers + 2).to(tl.pointer_type(tl.float32))
    stride = tl.multiple_of(tl.load(layers + 5), ALIGNED_UNITS)
    key = tl.arange(0, KEYS)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = key < KEY, value < VALUE
    both = is_value[:, None] & is_key[None, :]
    element = head * VALUE * KEY + value[:, None] * KEY + key[None, :]
    if DECAY == _BY_KEY:
        # A warp sums four neighbours in a thread first, as vLLM's does, if it is told so.
        rows = tl.multiple_of(rows, 16)
    else:
        rate = rate_of(tl.load(layers + 3).to(tl.pointer_type(RATE)), head, DECAY)
        shift = tl.load(tl.load(layers + 4).to(tl.pointer_type(BIAS)) + head).to(tl.float32)
    _, to_key, to_value = places_of(head, DECAY, GROUPS, HEADS, KEY, VALUE)
    # A prompt that is not at its end has no token drawn: its first row counts.
    count = tl.maximum(tl.load(num_sampled + req), 1)
    length = tl.load(seq_lens + req).to(tl.int64) - num_rows
    block_size = tl.load(tables + layer * 3 + 2)
    state = tl.load(states + before * stride + element, mask=both, other=0).to(tl.float32)
    for d in range(0, count):
        node = tl.load(path + req * path_stride + d, mask=d > 0, other=0)
        line = first + node
        vectors = rows + line * row_stride
        k = tl.load(vectors + to_key + key, mask=is_key, other=0).to(tl.float32)
        v = tl.load(vectors + to_value + value, mask=is_value, other=0).to(tl.float32)
        own = gates + line * (NUMBERS * HEADS)
        if DECAY == _BY_KEY:
            decay = tl.load(own + head * KEY + key, mask=is_key, other=0)
            share = tl.load(own + HEADS * KEY + head)
        else:
            beta = None
            if DECAY == _SCALAR:
                beta = tl.load(own + HEADS + head)
            x = tl.load(own + head) + shift
            decay, share = gated(x, beta, rate, 0.0, DECAY, False)
        if DECAY != _SELECTIVE:
            k = of_length_one(k, DECAY)
        state = stepped(state, k, v, decay, share, DECAY)
        # The next step starts from the last one. Where states are cached by prefix, vLLM also
        # keeps the one that ends a block.
        wanted = d == count - 1
        if BY_PREFIX:
            wanted = wanted | ((length + d + 1) % block_size == 0)
        target = tl.load(columns + d).to(tl.int64)
        if wanted & (target > 0):
            tl.store(states + target * stride + element, state, mask=both)


def fold_states(
    table: FoldTable, kept: KeptRows, query_start_loc: torch.Tensor, path: torch.Tensor,
    num_sampled: torch.Tensor, seq_lens: torch.Tensor, num_reqs: int,
) -> None:  # fmt: skip
    """Leave the states that a chain of the accepted rows would have left, in all layers. The
    arithmetic is that of `tree_recurrence`, in the same order, so states have the same bits.
    Requests that have left no inputs are passed over. Arguments are as of `move_states`; 0 in
    `num_sampled` counts as 1."""
    if num_reqs == 0:
        return
    groups, heads, value, key = table.shape
    values, warps = tile_of(table.decay, value)
    state, row, rate, bias = (_TYPES[dtype] for dtype in table.dtypes)
    _fold_states_kernel[(cdiv(value, values), num_reqs * heads, len(table.layers))](
        table.layers, table.tables, kept.firsts, kept.accepted, query_start_loc, path, num_sampled,
        seq_lens, path.stride(0), table.row_stride,
        STATE=state, ROW=row, RATE=rate, BIAS=bias, ALIGNED_BYTES=table.alignment,
        ALIGNED_UNITS=table.alignment // table.dtypes[0].itemsize, GROUPS=groups, HEADS=heads,
        KEY=key, VALUE=value, KEYS=next_power_of_2(key), VALUES=values, BY_PREFIX=table.by_prefix,
        DECAY=int(table.decay), NUMBERS=numbers_of(table.decay, key), num_warps=warps,
    )  # fmt: skip
