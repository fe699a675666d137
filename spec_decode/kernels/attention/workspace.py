"""Memory for the partial results of attention that is split over the keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_graft.spec_decode.kernels.sizes import cdiv

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
        cls,
        max_reqs: int,
        max_rows: int,
        num_heads: int,
        head_size: int,
        max_splits: int,
        device: torch.device | str,
    ) -> AttentionWorkspace:
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
    """Splits for so many `programs`, where programs load without stages.

    `room` is the splits that there is memory for, `least` the keys that a split should have.
    """
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
