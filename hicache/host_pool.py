"""The host memory of the cache: one region a node, shared by all ranks and the scheduler.

Rank-major: the slots of a rank (a *shard*) lie together, so that a rank pins only its own part and
has it on the NUMA node next to its GPU. Ranks that hold the same KV (MLA) share one shard.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from multiprocessing.util import Finalize

from vllm_graft.errors import ConfigError, GraftError
from vllm_graft.hicache import region
from vllm_graft.hicache.config import flag
from vllm_graft.hicache.numa import prefer_node
from vllm_graft.log import info_once

PAGE = mmap.PAGESIZE
POPULATE_BYTES = 1 << 30
"""The largest piece of a shared region that is made present at once: a signal waits for it."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python does not name."""
PIN_BYTES = 16 << 30
"""About the largest piece that is pinned at once: the driver's time a call grows with it."""


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


class HostPool:
    """The region, mapped into this process.

    Args:
        shape: its sizes.
        name: name of the shared file; None maps memory of this process alone.
        node: NUMA node that ``shard`` should come from; None leaves it to the kernel.
        shard: the shard that this process fills; None if it only looks.
        creates: whether this process makes the shared file; exactly one of the engine does.

    Attributes:
        orphans: files of engines that were killed, which were deleted before this one was made.

    Raises:
        GraftError: if there is not as much memory, or the file is not that of this engine.
    """

    def __init__(
        self,
        shape: PoolShape,
        name: str | None = None,
        node: int | None = None,
        shard: int | None = None,
        creates: bool = False,
    ) -> None:
        self.shape = shape
        self.name = name
        self.orphans = region.remove_orphans() if creates else 0
        self._pinned: list[int] = []
        self._fd = -1
        self._inode: int | None = None
        if name is None:
            self._map = _map_private(shape.num_bytes)
        else:
            open_region = region.create if creates else region.attach
            self._fd = open_region(name, shape.num_bytes)
            self._inode = os.fstat(self._fd).st_ino
            self._map = mmap.mmap(self._fd, shape.num_bytes, flags=mmap.MAP_SHARED)
            info_once(f"host KV cache: {shape.num_bytes >> 20} MiB in {region.SHM / name}")
        with contextlib.suppress(OSError, ValueError):
            # Fewer TLB misses; a kernel without transparent hugepages goes on without.
            self._map.madvise(mmap.MADV_HUGEPAGE)
            # A child process must not make the pages copy-on-write under the device's copies.
            self._map.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(self._map)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        # The scheduler takes the name away once all have mapped it. An engine that does not come
        # so far must not leave it; this runs at the end of multiprocessing's children as well. What
        # is killed leaves it to the next engine.
        Finalize(self, _unlink, (name, self._inode), exitpriority=0)
        if node is not None and shard is not None:
            prefer_node(self.shard_address(shard), shape.shard_bytes, node)
        if name is not None and shard is not None:
            try:
                self._populate(shard)
            except ConfigError:
                self.close()
                raise

    def shard_address(self, shard: int) -> int:
        """Address of slot 0 of a shard."""
        return self.address + shard * self.shape.shard_bytes

    def _populate(self, shard: int) -> None:
        """Have all pages of a shard now, by its rank, so near to its GPU.

        Where they can't be had, a copy would end in SIGBUS later.

        Raises:
            ConfigError: if ``/dev/shm`` is full.
        """
        start, size = shard * self.shape.shard_bytes, self.shape.shard_bytes
        try:
            if not _populated(self._map, start, size):
                os.posix_fallocate(self._fd, start, size)
        except OSError as error:
            raise ConfigError(
                f"{flag('host_bytes')}: {region.SHM} has no room for {size} bytes any more "
                f"({error}): raise its size (docker --shm-size), or lower {flag('host_bytes')}."
            ) from None

    def page(self, shard: int, slot: int, num_bytes: int) -> memoryview:
        """The first ``num_bytes`` bytes of a slot, writable."""
        start = shard * self.shape.shard_bytes + slot * self.shape.slot_bytes
        return self._view[start : start + num_bytes]

    def pin(self, shard: int) -> None:
        """Register a shard with CUDA, so that the copy engines reach it.

        Raises:
            GraftError: if the driver refuses; what was registered is released.
        """
        import torch

        start, size = self.shard_address(shard), self.shape.shard_bytes
        runtime = torch.cuda.cudart()
        step = self.shape.pinned_slots * self.shape.slot_bytes
        for offset in range(0, size, step):
            piece = min(step, size - offset)
            error = int(runtime.cudaHostRegister(start + offset, piece, 0))
            if error != 0:
                self.unpin()
                raise GraftError(
                    f"CUDA did not pin {size} bytes of host memory (error {error} at byte "
                    f"{offset}): lower {flag('host_bytes')}, or raise the limits of locked memory "
                    "(ulimit -l) and of the container's memory."
                )
            self._pinned.append(start + offset)

    def unpin(self) -> None:
        """Undo :meth:`pin`."""
        if not self._pinned:
            return
        import torch

        runtime = torch.cuda.cudart()
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned.clear()

    def unlink(self) -> None:
        """Take the file's name away: the memory goes when the last process unmaps it."""
        _unlink(self.name, self._inode)

    def close(self) -> None:
        """Unpin and unmap. Copies must have finished. A second call does nothing."""
        if self._anchor is None:
            return
        self.unlink()
        self.unpin()
        self._view.release()
        self._anchor = None
        with contextlib.suppress(BufferError):
            # A page that storage still holds keeps the mapping until it is dropped, and the mapping
            # a copy of the descriptor, so the lock.
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)


def _unlink(name: str | None, inode: int | None) -> None:
    if name is not None:
        region.remove(name, inode)


def _map_private(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise GraftError(
            f"{num_bytes} bytes of host memory cannot be had ({error}): lower {flag('host_bytes')}."
        ) from None


def _populated(memory: mmap.mmap, start: int, size: int) -> bool:
    """Make pages present, also in huge pages if these were asked for; False on an old kernel.

    Raises:
        OSError: if there is no memory for them.
    """
    for offset in range(start, start + size, POPULATE_BYTES):
        try:
            memory.madvise(_POPULATE_WRITE, offset, min(POPULATE_BYTES, start + size - offset))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True
