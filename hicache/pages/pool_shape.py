"""How the host pool is divided: shards, slots, and pieces that are pinned at once."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.cache_config import flag

PAGE = mmap.PAGESIZE
"""Bytes of a page of the operating system's memory, not of a page of KV."""

PIN_BYTES = 16 << 30
"""About the most bytes that one call pins. The driver's time per call grows with the size."""


@dataclass(frozen=True)
class PoolShape:
    """Sizes of the host pool. They are the same in every process of an engine.

    Attributes:
        num_slots: slots per shard.
        slot_bytes: bytes per slot, a multiple of :data:`PAGE`.
        num_shards: number of shards. A slot number means the same page in each of them.
    """

    num_slots: int
    slot_bytes: int
    num_shards: int

    @classmethod
    def fit(cls, host_bytes: int, page_bytes: int, num_shards: int) -> PoolShape:
        """The shape with the most slots that fit into ``host_bytes``.

        Args:
            host_bytes: bytes for all shards together.
            page_bytes: bytes of one rank's largest page in any pool.
            num_shards: number of ranks that hold KV of their own.

        Raises:
            ConfigError: if not even one slot fits.
        """
        slot_bytes = -(-page_bytes // PAGE) * PAGE
        num_slots = host_bytes // (slot_bytes * num_shards)
        if num_slots < 1:
            raise ConfigError(
                f"{flag('host_bytes')} is {host_bytes}, but a page of KV takes {slot_bytes} bytes "
                f"on each of {num_shards} rank(s): give at least {slot_bytes * num_shards}."
            )
        return cls(num_slots, slot_bytes, num_shards)

    @property
    def shard_bytes(self) -> int:
        """Bytes per shard."""
        return self.num_slots * self.slot_bytes

    @property
    def pinned_slots(self) -> int:
        """Slots per pinned piece. CUDA refuses copies across the border of two pieces."""
        return max(1, PIN_BYTES // self.slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return self.shard_bytes * self.num_shards
