"""The rows of a draft's output head that belong to its hot tokens, as loaded or in FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch

from vllm_graft.seams.ranks import gather_rows
from vllm_graft.spec_decode.heads.fp8_head import Fp8Head

_CHUNK = 4096
"""Rows that tensor-parallel ranks exchange at a time: 67 MB of 4,096 numbers in 32 bits."""


class HotRows(Protocol):
    """Some rows of an output head. Their addresses never change, as CUDA graphs hold them."""

    @property
    def num_bytes(self) -> int:
        """Device bytes that they take."""
        ...

    def take(self, ids: torch.Tensor) -> None:
        """Take the head's rows of `ids`, int64 ``[size]`` of the draft's vocabulary.

        All ranks of tensor parallelism call this at once, and each gets all rows.
        """
        ...

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """Multiply states ``[num_rows, hidden]``: logits ``[num_rows, size]``. Capturable."""
        ...


class PlainRows:
    """Rows as they were loaded.

    Args:
        head: vLLM's layer with the draft's rows, sharded or not.
        size: number of rows.

    Attributes:
        weight: ``[size, hidden]``, of the head's dtype.
    """

    def __init__(self, head: Any, size: int) -> None:
        self._head = head
        self.weight = head.weight.detach().new_empty(size, head.weight.shape[1])

    @property
    def num_bytes(self) -> int:
        return int(self.weight.nbytes)

    def take(self, ids: torch.Tensor) -> None:
        for wanted, out in _parts(self._head, ids, self.weight):
            take_rows(self._head, wanted, out=out)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.weight.t()


class Fp8Rows:
    """Rows of a head that is kept in FP8.

    Args:
        fp8: the head in FP8, whose numbers and scales are copied.
        head: vLLM's layer with the draft's rows, which says how they are sharded.
        size: number of rows.

    Attributes:
        rows: the copies.
    """

    def __init__(self, fp8: Fp8Head, head: Any, size: int) -> None:
        self._fp8, self._head = fp8, head
        self.rows = fp8.empty(size)

    @property
    def num_bytes(self) -> int:
        return self.rows.num_bytes

    def take(self, ids: torch.Tensor) -> None:
        # Copies are of bytes: not every operator knows numbers of 8 bits.
        for source, target in zip(_bytes(self._fp8), _bytes(self.rows), strict=True):
            for wanted, out in _parts(self._fp8, ids, target):
                self._take(source, wanted, out)

    def _take(self, source: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        if self._fp8.tp_size == 1:
            torch.index_select(source, 0, ids, out=out)
            return
        mine, rows = _held(self._head, ids)
        own = torch.zeros_like(out)
        own[mine] = source[rows]
        # Each row is on one rank, and zero on the others.
        out.copy_(gather_rows(own.view(torch.int32)).sum(0, dtype=torch.int32).view(torch.uint8))

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        return self.rows.apply(self.rows, states)


def _parts(
    head: Any, ids: torch.Tensor, out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What is taken at a time: all of it, unless ranks have to exchange it."""
    size = _CHUNK if head.tp_size > 1 else len(ids)
    return zip(ids.split(size), out.split(size), strict=True)


def _bytes(head: Fp8Head) -> tuple[torch.Tensor, torch.Tensor]:
    """A head's numbers and scales as bytes: ``[rows, hidden]`` and ``[rows, 4]``."""
    return head.weight.view(torch.uint8), head.scale.view(torch.uint8)


def take_rows(head: Any, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the head's weight rows of `ids` on every rank, wherever its shards lie."""
    weight = head.weight.detach()
    if head.tp_size == 1:
        return torch.index_select(weight, 0, ids, out=out)
    from vllm.distributed import tensor_model_parallel_all_reduce

    mine, held = _held(head, ids)
    rows = weight.new_zeros(len(ids), weight.shape[1])
    rows[mine] = weight[held]
    rows = tensor_model_parallel_all_reduce(rows)
    return rows if out is None else out.copy_(rows)


def _held(head: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of `ids` this rank holds, bool ``[n]``, and their rows in its shard."""
    shard = head.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    mine = (ids >= start) & (ids < end)
    return mine, ids[mine] - start
