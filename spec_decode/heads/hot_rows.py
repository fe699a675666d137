"""The rows of a draft's output head that belong to its hot tokens, as loaded or in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_graft.seams.ranks import gather_rows
from vllm_graft.spec_decode.heads.fp8_head import Fp8Head

_CHUNK = 4096
"""Rows that tensor-parallel ranks exchange at a time: 67 MB of 4,096 numbers in 32 bits."""


class PlainRows:
    """`size` rows as they were loaded, of a `head` that is sharded or not.

    Addresses of rows never change, as CUDA graphs hold them.
    """

    def __init__(self, head: Any, size: int) -> None:
        self._head = head
        self.weight = head.weight.detach().new_empty(size, head.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes)

    def take(self, ids: torch.Tensor) -> None:
        """Take the head's rows of `ids`, int64 ``[size]`` of the draft's vocabulary.

        All ranks of tensor parallelism call this at once, and each gets all rows.
        """
        take_rows(self._head, ids, out=self.weight)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply states ``[num_rows, hidden]``: logits ``[num_rows, size]``. Capturable."""
        return states @ self.weight.t()


class Fp8Rows:
    """`size` rows of a head that is kept in FP8; `head` says how they are sharded."""

    def __init__(self, fp8: Fp8Head, head: Any, size: int) -> None:
        self._fp8, self._head = fp8, head
        self.rows = fp8.empty(size)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes

    def take(self, ids: torch.Tensor) -> None:
        # Copies are of bytes: not every operator knows numbers of 8 bits.
        for source, target in zip(_bytes(self._fp8), _bytes(self.rows), strict=True):
            _take(source, self._head, ids, target, _sum_bytes)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        return self.rows.apply(self.rows, states)


HotRows = PlainRows | Fp8Rows


def take_rows(head: Any, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the head's weight rows of `ids` on every rank, wherever its shards lie."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    weight = head.weight.detach()
    if out is None:
        out = weight.new_empty(len(ids), weight.shape[1])
    return _take(weight, head, ids, out, tensor_model_parallel_all_reduce)


def _take(
    source: torch.Tensor,
    head: Any,
    ids: torch.Tensor,
    out: torch.Tensor,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Fill `out` with the rows of `ids`, and return it; `source` has those that this rank holds.

    `add_up` adds up tensors of all ranks: each row is on one rank, and zero on the others.
    """
    if head.tp_size == 1:
        return torch.index_select(source, 0, ids, out=out)
    shard = head.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    for wanted, filled in zip(ids.split(_CHUNK), out.split(_CHUNK), strict=True):
        mine = (wanted >= start) & (wanted < end)
        own = torch.zeros_like(filled)
        own[mine] = source[wanted[mine] - start]
        filled.copy_(add_up(own))
    return out


def _sum_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The sum of bytes ``[n, width]`` over all ranks, one of which has others than zeros."""
    return gather_rows(rows.view(torch.int32)).sum(0, dtype=torch.int32).view(torch.uint8)


def _bytes(head: Fp8Head) -> tuple[torch.Tensor, torch.Tensor]:
    return head.weight.view(torch.uint8), head.scale.view(torch.uint8)
