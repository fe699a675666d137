"""Copies between host and device: which pages move together, and how operations are merged."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field


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
