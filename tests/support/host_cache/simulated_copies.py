"""A copy engine beside a few layers of KV, on streams that run their work late."""

import ctypes
from functools import partial
from typing import Any

import torch

from vllm_graft.hicache.copies.copy_engine import MemoryCopyEngine, fp8_copy
from vllm_graft.hicache.copies.strided import HostShard
from vllm_graft.hicache.messages.operation import CacheOperation, Direction, PoolTransfer
from vllm_graft.hicache.pages.host_form import FP8
from vllm_graft.hicache.pages.layout import group_layers, pages_bytes

BLOCKS, SLOTS, LAYERS = 16, 8, 3


ROW = 2 * 16 * 4
"""Bytes of a block and layer."""


def bytes_at(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _tensor_copy(sources: Any, targets: Any, sizes: Any, any_order: bool) -> None:
    """Copy by operators of torch, which the simulator sees."""
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist()):
        bytes_at(target, size).copy_(bytes_at(source, size))


def run_copy(runs: Any) -> Any:
    return lambda begin, end: _tensor_copy(
        runs.host[begin:end], runs.device[begin:end], runs.sizes[begin:end], True
    )


def _ring(buffer_bytes: int) -> Any:
    """Make buffers of so many bytes, filled with a byte that no test expects."""
    from vllm_graft.hicache.copies.row_copies import BUFFERS, StagingRing

    return StagingRing(torch.full((BUFFERS * buffer_bytes,), 0x5A, dtype=torch.uint8))


class Rig:
    def __init__(
        self,
        streams: bool,
        host_dtype: torch.dtype = torch.float32,
        strided: Any = None,
        staging_rows: int = 0,
    ) -> None:
        self.caches = {f"layers.{n}.attn": torch.zeros(BLOCKS, 2, 16) for n in range(LAYERS)}
        self.dtype = host_dtype
        form, convert = None, None
        if host_dtype is not torch.float32:
            form, convert = FP8, partial(fp8_copy, torch.float32)
        pools = {0: group_layers(list(self.caches), self.caches, BLOCKS, form)}
        self.slot_bytes = pages_bytes(pools[0])
        self.host = torch.zeros(SLOTS, self.slot_bytes, dtype=torch.uint8)
        self.shard = HostShard(self.host.data_ptr(), self.slot_bytes, SLOTS)
        if streams:
            from vllm_graft.hicache.copies.streams import StreamCopyEngine

            self.engine: Any = StreamCopyEngine(
                pools,
                self.shard,
                _tensor_copy,
                run_copy,
                convert=convert,
                strided=strided,
                ring=_ring(staging_rows * ROW) if staging_rows else None,
            )
        else:
            self.engine = MemoryCopyEngine(pools, self.shard, convert=convert)

    def write(self, block: int, value: float) -> None:
        for cache in self.caches.values():
            cache[block] = value

    def slot(self, number: int) -> torch.Tensor:
        return self.host[number].view(self.dtype).float()

    def fill(self, number: int, value: float) -> None:
        self.host[number].view(self.dtype)[:] = value

    def pages(self, way: Direction, blocks: list[int], slots: list[int], job: int = 0) -> Any:
        return CacheOperation([job], way, [PoolTransfer(0, slots, blocks)])

    def operation(self, direction: Direction, block: int, slot: int, job: int = 0) -> Any:
        return self.pages(direction, [block], [slot], job)
