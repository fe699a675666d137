"""Calls of the kernels of recurrent layers, in sizes and dtypes of published models."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm_graft.spec_decode.startup.stand_ins import META, empty
from vllm_graft.spec_decode.targets.recurrent.kernels.chunk import tree_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    DeltaGates,
    Gates,
    KeptRows,
    KeyDecays,
    LayerInputs,
    RecurrentRows,
    SelectiveGates,
    keep_rows,
    numbers_of,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_conv, tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import (
    FoldedLayer,
    FoldTable,
    fold_states,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import (
    RecurrentCache,
    StateTable,
    move_states,
)

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = {
    Decay.SCALAR: (16, 32, 128, 128),
    Decay.BY_KEY: (32, 32, 128, 128),
    Decay.SELECTIVE: (8, 64, 64, 128),
}
"""Groups (heads of keys), heads of values, and the two sizes of a state."""

NAMES = empty(2), empty(2), empty(3), empty(2)
"""Numbers of two requests: rows that count, drafts, first rows and tokens."""


def which(rows: int) -> RecurrentRows:
    return RecurrentRows(empty(2 * rows), empty(3), empty(2, rows), empty(2), 2)


def kept_rows(rows: int) -> KeptRows:
    return KeptRows.allocate(2 * rows, 2 * rows, META)


def gates_of(decay: Decay, rows: int, dtype: torch.dtype, bounded: bool = False) -> Gates:
    _, heads, _, key = SIZES[decay]
    rates, per_head = empty(heads, dtype=FP32), empty(heads, dtype=dtype)
    per_row = empty(2 * rows, heads, dtype=dtype)
    if decay is Decay.SELECTIVE:
        return SelectiveGates(per_row, rates, per_head, per_head)
    if decay is Decay.BY_KEY:
        decays, bias = empty(2 * rows, heads, key, dtype=dtype), empty(heads * key, dtype=FP32)
        return KeyDecays(decays, per_row, rates, bias, -5.0 if bounded else None)
    return DeltaGates(per_row, per_row, rates, per_head)


def run(
    decay: Decay,
    dtype: torch.dtype,
    state: torch.dtype = FP32,
    *,
    chunk: int = 0,
    bounded: bool = False,
) -> None:
    """The rows of trees: one after another, or as chunks of so many."""
    groups, heads, value, key = SIZES[decay]
    rows = chunk or 8
    features = empty(2 * rows, 2 * groups * key + heads * value, dtype=dtype)
    states = empty(4, heads, value, key, dtype=state)
    given = features, gates_of(decay, rows, dtype, bounded), states, which(rows)
    out = empty(2 * rows, heads, value, dtype=dtype)
    if not chunk:
        tree_recurrence(*given, out, groups=groups)
        return
    keep_rows(kept_rows(64), which(64), empty(128, dtype=torch.int64), 64)
    kept = empty(2 * rows, numbers_of(decay, key), heads, dtype=FP32)
    tree_chunk(*given, kept_rows(rows), kept, out, groups=groups, max_rows=rows)


def convolve(dtype: torch.dtype) -> None:
    inputs, windows = empty(16, 8192, dtype=dtype), empty(4, 8192, 19, dtype=dtype)
    weights, bias = empty(8192, 4, dtype=dtype), empty(8192, dtype=dtype)
    tree_conv(inputs, windows, weights, bias, which(16), silu=True)


def fold(decay: Decay, dtype: torch.dtype, state: torch.dtype, *, by_prefix: bool) -> None:
    groups, heads, value, key = SIZES[decay]
    features = empty(16, 2 * groups * key + heads * value, dtype=dtype)
    inputs = LayerInputs(features, empty(16, numbers_of(decay, key), heads, dtype=FP32))
    gates = empty(heads, dtype=FP32), empty(heads, dtype=dtype)
    rates, bias = (None, None) if decay is Decay.BY_KEY else gates
    states = empty(4, heads, value, key, dtype=state)
    layer = FoldedLayer(inputs, states, rates, bias, groups, empty(2, 8), 64, decay)
    table = FoldTable.build([layer], by_prefix=by_prefix)
    counts, _, starts, lens = NAMES
    fold_states(table, kept_rows(8), starts, empty(2, 8), counts, lens, 2)


def move(dtype: torch.dtype, *, units: int, by_prefix: bool) -> None:
    """Where layers keep no inputs, nothing is passed over."""
    windows, states = empty(4, 8192, 19, dtype=dtype), empty(4, units, dtype=dtype)
    table = StateTable.build(
        [RecurrentCache(windows, states, 4, empty(2, 8), 64)], by_prefix=by_prefix
    )
    counts, drafts, starts, lens = NAMES
    kept = (kept_rows(8), starts) if by_prefix else ()
    move_states(table, empty(2, 8), counts, drafts, lens, 2, *kept)


def calls() -> Iterator[Callable[[], object]]:
    yield from (partial(convolve, dtype) for dtype in (BF16, FP32))
    for decay in Decay:
        yield partial(run, decay, BF16)
        yield from (partial(run, decay, BF16, chunk=rows) for rows in (16, 64))
    yield partial(run, Decay.SCALAR, BF16, BF16)
    yield partial(run, Decay.BY_KEY, FP32)
    yield partial(run, Decay.SCALAR, FP32, chunk=64)
    yield partial(run, Decay.BY_KEY, FP32, chunk=64, bounded=True)
    yield partial(fold, Decay.SCALAR, BF16, FP32, by_prefix=True)
    yield partial(fold, Decay.SCALAR, FP32, BF16, by_prefix=False)
    yield partial(fold, Decay.BY_KEY, BF16, FP32, by_prefix=True)
    yield partial(fold, Decay.SELECTIVE, BF16, FP32, by_prefix=False)
    yield partial(move, FP32, units=8192, by_prefix=True)
    yield partial(move, BF16, units=8193, by_prefix=False)
