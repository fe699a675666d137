"""The memory of splits, and the plan of a launch of tree attention, by sizes that the host knows
before it. The rule for sm_90 and sm_10x follows what a search on an H200 found
(``benchmarks/attention/search`` in git at 0b4bb377). Elsewhere, for float32 and in the interpreter,
programs load without stages."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from vllm_graft.spec_decode.kernels.kernel_launch import cdiv, next_power_of_2

MAX_TILE = 128
"""Most query rows of a program, times the heads that share K/V, at a head size of 128."""

# A split of fewer keys costs more in the combine step than it gains. A draft's rows are few, so its
# combine step costs less.
MIN_SPLIT_KEYS = 128
MIN_DRAFT_SPLIT_KEYS = 64
_SPLIT_BYTES = 256 << 20


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results of the splits, at addresses that graphs may hold.

    The tensors are flat, so that layers of different sizes (target and draft) share them. A pair of
    request and split takes ``rows * num_heads * (head_size + 2) * 4`` bytes. The number of splits
    falls as the number of requests rises, so there is room for as many pairs as give each of
    ``4 * multiprocessors`` programs a tile of 128 rows, for at least ``max_splits`` pairs, and for
    at most ``max_reqs * max_splits``, but never for more than 256 MiB.

    Attributes:
        acc: f32 ``[pairs * max_rows * num_heads * head_size]``, not yet normalised.
        peak: f32 ``[pairs * max_rows * num_heads]``, largest logit in units of log 2.
        total: f32, likewise, sum of weights.
        capability: compute capability of an NVIDIA device, else zeros.
    """

    acc: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor
    max_splits: int
    multiprocessors: int
    capability: tuple[int, int] = (0, 0)

    @classmethod
    def allocate(
        cls, max_reqs: int, max_rows: int, num_heads: int, head_size: int, max_splits: int,
        device: torch.device | str,
    ) -> AttentionWorkspace:  # fmt: skip
        """Space for calls of at most ``max_reqs`` requests of ``max_rows`` rows each."""
        multiprocessors, capability = _device_of(torch.device(device))
        pairs = 4 * multiprocessors * MAX_TILE // (max_rows * num_heads)
        pair_bytes = 4 * max_rows * num_heads * (head_size + 2)
        max_splits = max(1, min(max_splits, _SPLIT_BYTES // pair_bytes))
        pairs = min(max(pairs, max_splits), max_reqs * max_splits)
        places = pairs * max_rows * num_heads
        return cls(
            acc=torch.empty(places * head_size, dtype=torch.float32, device=device),
            peak=torch.empty(places, dtype=torch.float32, device=device),
            total=torch.empty(places, dtype=torch.float32, device=device),
            max_splits=max_splits,
            multiprocessors=multiprocessors,
            capability=capability,
        )

    def num_pairs(self, rows: int, num_heads: int, head_size: int) -> int:
        places = rows * num_heads
        return int(min(self.peak.numel() // places, self.acc.numel() // (places * head_size)))


def split_count(
    programs: int, multiprocessors: int, max_seq_len: int, room: int, least: int
) -> int:
    """Splits for so many `programs`, where programs load without stages. `room` is the splits that
    there is memory for, `least` the keys that a split should have."""
    # Two programs on a multiprocessor hide each other's waits. Where most multiprocessors have
    # one without splits already, the combine step would cost more than splits gain.
    wanted = 2 * multiprocessors // programs
    if 4 * programs > 3 * multiprocessors:
        wanted = 1
    return max(1, min(wanted, cdiv(max_seq_len, least), room))


def _device_of(device: torch.device) -> tuple[int, tuple[int, int]]:
    if device.type == "meta" and torch.cuda.is_available():
        # No memory is asked for: it stands for the device of this process.
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "cuda":
        return 8, (0, 0)  # The interpreter: any number that makes splits happen.
    found = torch.cuda.get_device_properties(device)
    # Other vendors' devices have numbers of their own.
    capability = (found.major, found.minor) if torch.version.hip is None else (0, 0)
    return int(found.multi_processor_count), capability


# For batches whose requests mostly have far fewer rows than the bound: most of a larger tile would
# be empty, and programs without rows would hold a multiprocessor for themselves.
_MIXED_TILE = 32

_PIECE = 128
"""Most numbers of a head that a program makes when it combines: more would spill registers."""

_LONG_SPLIT = 2048
"""Keys of a split from which on a second program on the multiprocessor gains."""

_MOST_DOUBLED = 16
_MOST_DRAFT_SPLITS = 16
"""Splits above which what they gain goes into combining them."""

_ROOM_FOR_TWO = 113 << 10
"""Bytes of shared memory that a program leaves for another one, of 227 KiB."""


class Tile(NamedTuple):
    """What a program holds at a time, and how. `rows`: query rows, times the heads that share K/V.
    `keys`: keys whose K/V is held. `stages`: stages of its loop over the keys."""

    rows: int
    keys: int
    warps: int
    stages: int

    @classmethod
    @functools.cache
    def choose(
        cls, rows: int, head_pad: int, dtype: torch.dtype, *, crowded: bool, split: bool
    ) -> Self:
        """Choose a tile whose accumulator and two K/V tiles fit a block. `rows` are those of a
        request, times the heads that share K/V. If `crowded`, multiprocessors have several programs
        each, which hide one another's waits; otherwise the loads of one program should be few,
        large and at once. If `split`, several programs share a request's keys, so each has few."""
        rows = max(16, next_power_of_2(rows))
        if dtype == torch.float32:
            # Exact float32 has no tensor cores: small tiles, or registers spill.
            return cls(min(rows, 32 if head_pad <= 128 else 16), 32, 4, 1)
        wide = max(head_pad, 128) // 128
        if crowded:
            rows = min(rows, MAX_TILE // wide)
            return cls(rows, 64 if wide == 1 else 32, 8 if rows * head_pad > 64 * 128 else 4, 2)
        return cls(min(rows, MAX_TILE // 2 // wide), (64 if split else 128) // wide, 4, 1)


class Plan(NamedTuple):
    """How the kernels of one launch compute. All plans compute the same, but for rounding.

    Attributes:
        tile: what a program holds at a time.
        splits: programs that share a request's paged keys.
        ahead: whether page numbers are loaded one step of the loop before their keys.
        edges: whether the rows' windows are looked at only near where they begin and end.
        skip_empty: whether splits without keys, as a graph for long contexts has over short ones,
            neither write nor are read. Otherwise they write that they have seen nothing.
        combine_width: most numbers of a head that a program which combines splits makes, a power of
            2; 0 for all. It holds as many of each split.
        overlapped: whether the kernel that combines is launched while the splits still run, and
            waits for them itself (programmatic dependent launch). From sm_90 on.
    """

    tile: Tile
    splits: int = 1
    ahead: bool = False
    edges: bool = False
    skip_empty: bool = False
    combine_warps: int = 4
    combine_width: int = 0
    overlapped: bool = False


class Sizes(NamedTuple):
    """What the rule looks at; see `AttentionCall` and `AttentionWorkspace`.

    Attributes:
        rows: query rows of a request, times the heads that share K/V.
        head: elements of a head, padded to a power of 2.
        dtype: computed in: the query's, or fp16 if that is e4m3.
        keys: upper bound of a request's paged keys, so that all lengths of a graph have one plan.
        most_splits: splits that there is memory for.
        multiprocessors: of the device; 0 without a workspace.
        native: whether query and cache are e4m3 and multiplied as they are.
    """

    rows: int
    head: int
    dtype: torch.dtype
    num_reqs: int
    kv_heads: int
    keys: int
    window: bool = False
    draft: bool = False
    mixed: bool = False
    most_splits: int = 1
    multiprocessors: int = 0
    capability: tuple[int, int] = (0, 0)
    native: bool = False

    @property
    def staged(self) -> bool:
        # Others than these have at most 163 KiB of shared memory, those of sm_12x 99.
        return self.capability[0] in (9, 10) and self.dtype.itemsize == 2

    @property
    def crowded(self) -> bool:
        """Whether each multiprocessor has a program, however few rows a tile has."""
        return self.num_reqs * self.kv_heads > self.multiprocessors

    @property
    def most_rows(self) -> int:
        return min(self.rows, _MIXED_TILE if self.mixed else MAX_TILE)

    def programs(self, tile: Tile) -> int:
        return self.num_reqs * self.kv_heads * cdiv(self.rows, tile.rows)


@functools.lru_cache(maxsize=1 << 12)
def choose_plan(sizes: Sizes, splits: int | None = None) -> Plan:
    """How to compute a launch, with a forced number of splits if one is given."""
    if not sizes.staged:
        found = _plain_splits(sizes) if splits is None else splits
        return Plan(_plain_tile(sizes, split=found > 1), found)
    if splits is None:
        plain = _plain_splits(sizes)
        splits = min(plain, _MOST_DRAFT_SPLITS) if sizes.draft else _splits(sizes)
    return staged_plan(sizes, _tile(sizes, split=splits > 1), splits)


def staged_plan(sizes: Sizes, tile: Tile, splits: int) -> Plan:
    """A plan of such a tile and of so many splits, with the options that were found to help."""
    plan = Plan(tile, splits, ahead=tile.stages > 1, edges=sizes.window and not sizes.draft)
    if splits == 1:
        return plan
    width = min(sizes.head, _PIECE)
    return plan._replace(
        skip_empty=True,
        combine_warps=combine_warps(splits, width),
        combine_width=width,
        overlapped=True,
    )


def combine_warps(splits: int, width: int) -> int:
    """Warps that hold so many numbers of so many splits, 64 in a thread."""
    return min(8, max(1, next_power_of_2(splits) * width // (64 * 32)))


def shared_bytes(tile: Tile, head: int, itemsize: int = 2) -> int:
    """About the shared memory of a program, from sm_90 on; `head` is padded."""
    # Products of 64 rows and more are asynchronous, and hold one stage more.
    stages = max(tile.stages - (tile.rows < 64), 1)
    return (stages * 2 * tile.keys + tile.rows) * head * itemsize


def native_bytes(tile: Tile, head: int) -> int:
    """About the shared memory of a program over e4m3 keys, at most, as `shared_bytes`. A tile of K
    and V lies there once more in fp16, and the stage that is converted is free."""
    staged = max(tile.stages - 1, 1) * 2 * tile.keys
    return (staged + 2 * (2 * tile.keys + tile.rows)) * head


def _plain_tile(sizes: Sizes, *, split: bool) -> Tile:
    return Tile.choose(sizes.most_rows, sizes.head, sizes.dtype, crowded=sizes.crowded, split=split)


def _plain_splits(sizes: Sizes) -> int:
    return split_count(
        sizes.programs(_plain_tile(sizes, split=True)),
        sizes.multiprocessors,
        sizes.keys,
        sizes.most_splits,
        MIN_DRAFT_SPLIT_KEYS if sizes.draft else MIN_SPLIT_KEYS,
    )


def _splits(sizes: Sizes) -> int:
    tile = _tile(sizes, split=True)
    wanted = sizes.multiprocessors // sizes.programs(tile)
    # One program of 64 rows has four warps, which are few for a multiprocessor.
    least = 1 if sizes.native else 2
    few = least <= wanted <= _MOST_DOUBLED // 2
    if few and sizes.keys >= _LONG_SPLIT * wanted and _two_fit(sizes, tile):
        wanted *= 2
    return max(1, min(wanted, cdiv(sizes.keys, tile.keys), sizes.most_splits))


def _two_fit(sizes: Sizes, tile: Tile) -> bool:
    if not sizes.native:
        return shared_bytes(tile, sizes.head) <= _ROOM_FOR_TWO
    # Eight warps that hold 128 rows take the registers of the whole multiprocessor.
    return tile.rows < 128 and native_bytes(tile, sizes.head) <= _ROOM_FOR_TWO


def _native_tile(sizes: Sizes) -> Tile:
    """The tile over e4m3 keys that are loaded in stages. Tiles of 64 rows and more take keys and
    values from shared memory, where a program converts many at once. For fewer rows it would fetch
    each number of V by itself. One tile of 128 rows is slower than two of 64 in short contexts."""
    wide = sizes.most_rows > 64 and sizes.num_reqs * sizes.rows > 128
    rows = 128 if wide else 64
    return Tile(rows, 32 if sizes.head > 128 else 64, rows // 16, 3)


def _tile(sizes: Sizes, *, split: bool) -> Tile:
    if sizes.draft and (split or sizes.head > 128 or sizes.rows > 32):
        # The keys of the prefix are few then, and those of the scratch begin a second loop.
        return _plain_tile(sizes, split=split)
    if sizes.native and sizes.head <= 256 and not sizes.draft:
        return _native_tile(sizes)
    rows = max(16, next_power_of_2(sizes.most_rows))
    if sizes.head > 256:
        return Tile(64, 32, 8, 2) if rows >= 64 else Tile(rows, 16, 4, 3)
    if sizes.head > 128:
        return Tile(min(rows, 64), 32, 4, 3)
    if rows >= 128 and sizes.crowded:
        return Tile(128, 64, 8, 2)
    if rows >= 64:
        return Tile(64, 64, 4, 3)
    if split or (rows == 16 and sizes.crowded):
        return Tile(rows, 32, 4, 3)
    # The fewer rows, the more time is the wait for keys.
    return Tile(rows, 128 if rows == 16 and not sizes.draft else 64, 4, 3)
