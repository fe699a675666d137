"""Copies between host and device: which pages move together, and how operations are merged."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


class Direction(enum.Enum):
    """The direction in which an operation copies."""

    LOAD = "host to device"
    STORE = "device to host"


@dataclass
class PoolTransfer:
    """Pages of the pool (KV cache group) ``group`` that move in an operation. There is a block id
    in ``device_indices`` for each slot in ``host_indices``."""

    group: int
    host_indices: list[int]
    device_indices: list[int]

    def __len__(self) -> int:
        return len(self.host_indices)

    def share(self, number: int, count: int) -> "PoolTransfer":
        """The pages of share ``number``, if ``count`` shares have about as many each."""
        part = slice(number * len(self) // count, (number + 1) * len(self) // count)
        return PoolTransfer(self.group, self.host_indices[part], self.device_indices[part])


@dataclass
class CacheOperation:
    """Pages of several pools that move together, all or nothing. `ids` are numbers of the jobs that
    it does, one until operations are merged; those of smaller `priority` are copied first.
    `request_ids` wait for it, one for each of ``ids``; none for stores."""

    ids: list[int]
    direction: Direction
    transfers: list[PoolTransfer]
    priority: int = 0
    request_ids: list[str] = field(default_factory=list)


def share_of(operation: CacheOperation, rank: int, ranks: int) -> CacheOperation | None:
    """The part of an operation that one of ``ranks`` ranks does; None if there is none for it.

    The ranks get the same operations, and so agree without a message. Their parts are consecutive
    pages, because those are copied faster. The job's number decides who is first: else operations
    of a single page would all be one rank's."""
    number = (rank + operation.ids[0]) % ranks
    parts = [transfer.share(number, ranks) for transfer in operation.transfers]
    parts = [part for part in parts if len(part)]
    return replace(operation, transfers=parts) if parts else None


def merge_ops(operations: Iterable[CacheOperation]) -> CacheOperation | None:
    """Merge operations of one direction into one, the most urgent first; None without operations. A
    merged operation takes one submission to the driver and one event, however many requests it
    serves. Pools keep the order in which they first appear."""
    ordered = sorted(operations, key=lambda operation: operation.priority)
    if not ordered:
        return None
    pools: dict[int, PoolTransfer] = {}
    for operation in ordered:
        for transfer in operation.transfers:
            merged = pools.setdefault(transfer.group, PoolTransfer(transfer.group, [], []))
            merged.host_indices.extend(transfer.host_indices)
            merged.device_indices.extend(transfer.device_indices)
    return CacheOperation(
        ids=[job for operation in ordered for job in operation.ids],
        direction=ordered[0].direction,
        transfers=list(pools.values()),
        priority=ordered[0].priority,
        request_ids=[request for operation in ordered for request in operation.request_ids],
    )
