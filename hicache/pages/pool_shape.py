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
    """Sizes of the host pool, the same in every process.

    Attributes:
        num_slots: slots of a shard.
        slot_bytes: bytes of a slot, a multiple of the memory page.
        num_shards: shards; the same slot number means the same page in each.
    """

    num_slots: int
    slot_bytes: int
    num_shards: int

    @classmethod
    def fit(cls, host_bytes: int, page_bytes: int, num_shards: int) -> PoolShape:
        """As many slots as fit.

        Args:
            host_bytes: memory of all shards.
            page_bytes: bytes of the largest page of any pool on one rank.
            num_shards: ranks with KV of their own.

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
        """Bytes of a shard."""
        return self.num_slots * self.slot_bytes

    @property
    def pinned_slots(self) -> int:
        """Slots that are pinned in one piece: CUDA refuses copies that reach into another."""
        return max(1, PIN_BYTES // self.slot_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return self.shard_bytes * self.num_shards
