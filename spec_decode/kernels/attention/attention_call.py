"""What launches of attention share, whatever the keys are: K and V of heads, or latents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vllm_graft.spec_decode.kernels.attention.attention_kernel import combine_kernel
from vllm_graft.spec_decode.kernels.sizes import cdiv, next_power_of_2


class AttentionCall(ABC):
    """What a launch reads: trees to verify, or one level of trees to draft. Attributes are those of
    its batch (`trees/batch.py`), and what is given as its `own`; a draft's `max_rows` is its
    ``topk``. What only one kind of batches has is None or 0 here."""

    query_start_loc: Any = None
    row_masks: Any = None
    row_depths: Any = None
    num_rows: Any = None
    mixed = chunked = False
    scratch: Any = None
    ancestors: Any = None
    level = 0

    def __init__(self, batch: Any, **own: Any) -> None:
        self.__dict__.update(vars(batch), num_reqs=batch.num_reqs, **own)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @abstractmethod
    def most_keys(self) -> int:
        """Upper bound of the paged keys that a request's rows read."""

    @property
    def draft(self) -> bool:
        return self.ancestors is not None

    @property
    def head_pad(self) -> int:
        return max(16, next_power_of_2(self.query.shape[2]))

    def parts(self, splits: int) -> int:
        """Programs per tile: one per split, and one more for a draft's scratch."""
        return splits + 1 if self.draft and splits > 1 else splits

    def shared(self) -> dict[str, Any]:
        return {
            "HEADS": self.query.shape[1],
            "PARTIAL_ROWS": self.max_rows,
            "DRAFT": self.draft,
            "TOPK": self.max_rows if self.draft else 1,
        }

    def room(self, workspace: AttentionWorkspace) -> int:
        pairs: int = workspace.num_pairs(self.max_rows, *self.query.shape[1:])
        free = pairs - self.num_reqs if self.draft else pairs
        return min(workspace.max_splits, int(free // self.num_reqs))

    def num_splits(
        self, programs: int, workspace: AttentionWorkspace | None, forced: int | None
    ) -> int:
        """Splits of each request's paged keys, for so many programs per request and split. The
        number depends on host values only, so that a captured grid stays right."""
        if forced is not None:
            return forced
        if workspace is None:
            return 1
        return split_count(
            self.num_reqs * programs,
            workspace.multiprocessors,
            self.most_keys(),
            self.room(workspace),
            MIN_DRAFT_SPLIT_KEYS if self.draft else MIN_SPLIT_KEYS,
        )

    def combine(
        self, out: torch.Tensor, workspace: AttentionWorkspace | None, splits: int, warps: int = 4,
        *, width: int = 0, overlapped: bool = False, used: UsedSplits | None = None,
    ) -> None:  # fmt: skip
        """Make the output of what the splits have left in the workspace, if there are several.
        Options are those of a `Plan`. `used` tells the splits without keys, which have written
        nothing; None if all have written."""
        if splits == 1:
            return
        parts = self.parts(splits)
        heads, size = self.query.shape[1:]
        width = min(width or self.head_pad, self.head_pad)
        combine_kernel[(self.num_reqs, self.max_rows, heads * cdiv(size, width))](
            out, *partial_results(workspace), self.query_start_loc, self.num_rows,
            used.kv_lens if used else None, parts, self.level, *out.stride()[:2],
            **self.shared(), HEAD=size, WIDTH=width, PARTS_PAD=next_power_of_2(parts),
            BLOCK_N=used.keys if used else 1, WINDOW=used.window if used else 0,
            CHUNKED=used.chunked if used else False, OVERLAPPED=overlapped, num_warps=warps,
            # Other devices than NVIDIA's don't know the option.
            **({"launch_pdl": True} if overlapped else {}),
        )  # fmt: skip


class UsedSplits(NamedTuple):
    """What tells the combining kernel which splits have keys. `kv_lens`, i32 ``[>= num_reqs]``, are
    each request's paged keys. Splits have whole tiles of `keys`. A `window` of 0 is none."""

    kv_lens: torch.Tensor
    keys: int
    window: int
    chunked: bool


def partial_results(workspace: AttentionWorkspace | None) -> tuple[torch.Tensor | None, ...]:
    """Where splits leave what they have found; nowhere without a workspace."""
    if workspace is None:
        return (None,) * 3
    return (workspace.acc, workspace.peak, workspace.total)


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
