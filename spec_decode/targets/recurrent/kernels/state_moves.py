"""Leaves recurrent states and windows of inputs as a chain of the accepted rows would have."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl

from vllm_graft.spec_decode.kernels.kernel_launch import Kernel, cdiv, next_power_of_2
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import KeptRows

_UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
_MAX_CHUNK = 4096
_MAX_FEATURES = 256


class RecurrentCache(NamedTuple):
    """What a recurrent layer caches.

    Attributes:
        windows: ``[num_blocks, dim, slots]``, inputs of its convolution, any strides.
        states: ``[num_blocks, ...]``, contiguous but for the first stride.
        width: inputs that the convolution mixes.
        blocks: i32 ``[max_reqs, max_blocks]``, the block table of its group by batch row; its
            address must stay.
    """

    windows: torch.Tensor
    states: torch.Tensor
    width: int
    blocks: torch.Tensor
    block_size: int


@dataclass(frozen=True)
class StateTable:
    """Where the states of each layer lie, for kernels that move all layers in one launch.

    It holds addresses, not tensors: build it again when the caches are allocated again.

    Attributes:
        states: i64 ``[num_layers, 2]``, address, and bytes from a block to the next.
        windows: i64 ``[num_layers, 6]``, address, bytes from a block to the next, from a slot to
            the next and from a feature to the next, features, and width of the convolution.
        tables: i64 ``[num_layers, 3]``, address of the block table, its stride, tokens per block.
        state_unit, window_unit: bytes that are moved as one number; of windows one input.
        state_units: units of a state.
        by_prefix: whether vLLM caches states by prefix (``mamba_cache_mode`` is ``align``). A
            request's columns then begin at the block of its last row, and all are kept.
    """

    states: torch.Tensor
    windows: torch.Tensor
    tables: torch.Tensor
    state_unit: int
    window_unit: int
    state_units: int
    max_features: int
    by_prefix: bool

    @classmethod
    def build(cls, caches: Sequence[RecurrentCache], *, by_prefix: bool) -> Self:
        """Describe the caches of layers with windows of one dtype and states of as many bytes."""
        sizes = {int(cache.states[0].nbytes) for cache in caches}
        kinds = {cache.windows.element_size() for cache in caches}
        if len(sizes) != 1 or len(kinds) != 1:
            raise ValueError(f"layers must have states of one size, got {sizes} and {kinds}")
        if not all(cache.states[0].is_contiguous() for cache in caches):
            raise ValueError("a state must be contiguous")
        device = caches[0].states.device
        (size,), (window_unit,) = sizes, kinds
        states = [[c.states.data_ptr(), _stride(c.states, 0)] for c in caches]
        numbers = [size, *(number for row in states for number in row)]
        unit = next(unit for unit in _UNITS if all(number % unit == 0 for number in numbers))
        windows = [
            [
                c.windows.data_ptr(),
                *(_stride(c.windows, dim) for dim in (0, 2, 1)),
                c.windows.shape[1],
                c.width,
            ]
            for c in caches
        ]
        tables = [[c.blocks.data_ptr(), c.blocks.stride(0), c.block_size] for c in caches]
        return cls(
            states=torch.tensor(states, device=device),
            windows=torch.tensor(windows, device=device),
            tables=torch.tensor(tables, device=device), state_unit=unit, window_unit=window_unit,
            state_units=size // unit, max_features=max(cache.windows.shape[1] for cache in caches),
            by_prefix=by_prefix,
        )  # fmt: skip


def _stride(tensor: torch.Tensor, dim: int) -> int:
    return int(tensor.stride(dim)) * int(tensor.element_size())


def clear_states(
    caches: Sequence[RecurrentCache], req: int, seq_lens: torch.Tensor, *, by_prefix: bool
) -> None:
    """Zero the state and the window that the request of batch row `req` starts from. It is rare: a
    launch or two for each layer will do."""
    for cache in caches:
        blocks = cache.blocks[req].long()
        if by_prefix:
            start = (seq_lens[req : req + 1].long() - 1).clamp(min=0) // cache.block_size
            block = blocks.index_select(0, start)
        else:
            block = blocks[:1]
        cache.states.index_fill_(0, block, 0)
        cache.windows.index_fill_(0, block, 0)


@triton.jit
def columns_of(tables, layer, req, seq_lens, BY_PREFIX: tl.constexpr):
    """A pointer to the request's columns in the block table of the layer."""
    table = tables + layer * 3
    columns = tl.load(table).to(tl.pointer_type(tl.int32))
    columns += req * tl.load(table + 1)
    if BY_PREFIX:
        last = tl.maximum(tl.load(seq_lens + req).to(tl.int64) - 1, 0)
        columns += last // tl.load(table + 2)
    return columns


@Kernel
@triton.jit
def _move_states_kernel(
    bases, tables, path, num_sampled, num_drafts, seq_lens, query_start_loc, firsts, path_stride,
    units,
    UNIT: tl.constexpr, UNIT_BYTES: tl.constexpr, CHUNK: tl.constexpr, BY_PREFIX: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    count = tl.load(num_sampled + req)
    if (tl.load(num_drafts + req) == 0) | (count < 2):
        return
    if firsts is not None:  # noqa: SIM102
        # A request that has left inputs has left no states.
        if tl.load(firsts + tl.load(query_start_loc + req)) >= 0:
            return
    base = tl.load(bases + layer * 2).to(tl.pointer_type(UNIT))
    stride = tl.load(bases + layer * 2 + 1) // UNIT_BYTES
    columns = columns_of(tables, layer, req, seq_lens, BY_PREFIX)
    unit = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = unit < units
    # The state after the last accepted row is what the next step starts from. Where states are
    # cached by prefix, vLLM also keeps one of a row in between, if a block ends with it.
    first = count - 1
    if BY_PREFIX:
        first = 1
    # The path rises and path[d] >= d, so in this order no state is read after it was overwritten.
    for d in range(first, count):
        node = tl.load(path + req * path_stride + d)
        if node != d:
            source = tl.load(columns + node).to(tl.int64)
            target = tl.load(columns + d).to(tl.int64)
            both = inside & (source > 0) & (target > 0)
            state = tl.load(base + source * stride + unit, mask=both, other=0)
            tl.store(base + target * stride + unit, state, mask=both)


@Kernel
@triton.jit
def _move_windows_kernel(
    layouts, tables, path, num_sampled, num_drafts, seq_lens, path_stride,
    UNIT: tl.constexpr, UNIT_BYTES: tl.constexpr, FEATURES: tl.constexpr, BY_PREFIX: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    layout = layouts + layer * 6
    count = tl.load(num_sampled + req)
    if (tl.load(num_drafts + req) == 0) | (count < 2):
        return
    block = tl.load(columns_of(tables, layer, req, seq_lens, BY_PREFIX)).to(tl.int64)
    if block <= 0:
        return
    feature = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES)
    inside = feature < tl.load(layout + 4)
    window = tl.load(layout).to(tl.pointer_type(UNIT))
    window += block * (tl.load(layout + 1) // UNIT_BYTES)
    window += feature * (tl.load(layout + 3) // UNIT_BYTES)
    slot = tl.load(layout + 2) // UNIT_BYTES
    window += (tl.load(layout + 5) - 2) * slot
    for d in range(1, count):
        node = tl.load(path + req * path_stride + d)
        if node != d:
            kept = tl.load(window + node * slot, mask=inside, other=0)
            tl.store(window + d * slot, kept, mask=inside)
            # Another thread may hold the next row's feature.
            tl.debug_barrier()


def move_states(
    table: StateTable, path: torch.Tensor, num_sampled: torch.Tensor, num_drafts: torch.Tensor,
    seq_lens: torch.Tensor, num_reqs: int, kept: KeptRows | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Copy what accepted node ``path[d]`` has left to where row ``d`` of a chain would leave it.

    These are the state in its column, and the input in the window. All layers take two launches.

    Args:
        path: i32 ``[>= num_reqs, width]`` by batch row, rising, ``path[0] == 0``.
        num_sampled: i32 ``[num_reqs]``, entries of ``path`` that count.
        num_drafts: i32 ``[>= num_reqs]``, 0 for a plain request.
        seq_lens: i32 ``[>= num_reqs]``, tokens of the request, the verified rows included.
        kept: requests that have left inputs in place of states, and are passed over; or None.
        query_start_loc: i32 ``[>= num_reqs + 1]``, first batch row of each request; None likewise.
    """
    if num_reqs == 0:
        return
    layers, units = len(table.states), table.state_units
    chunk = min(_MAX_CHUNK, next_power_of_2(units))
    arguments = (path, num_sampled, num_drafts, seq_lens)
    _move_states_kernel[(num_reqs, layers, cdiv(units, chunk))](
        table.states, table.tables, *arguments, query_start_loc,
        None if kept is None else kept.firsts, path.stride(0), units,
        UNIT=_UNITS[table.state_unit], UNIT_BYTES=table.state_unit, CHUNK=chunk,
        BY_PREFIX=table.by_prefix, num_warps=8,
    )  # fmt: skip
    features = min(_MAX_FEATURES, next_power_of_2(table.max_features))
    _move_windows_kernel[(num_reqs, layers, cdiv(table.max_features, features))](
        table.windows, table.tables, *arguments, path.stride(0),
        UNIT=_UNITS[table.window_unit], UNIT_BYTES=table.window_unit, FEATURES=features,
        BY_PREFIX=table.by_prefix, num_warps=4,
    )  # fmt: skip
