"""The memory of the host pool, which all ranks and the scheduler of an engine share.

The slots of one rank lie together and form a *shard*. So a rank pins only its own shard, on the
NUMA node next to its GPU. Ranks that hold the same KV (MLA) share one shard, of which each takes a
part from its node.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
from multiprocessing.util import Finalize
from pathlib import Path

from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.locks import ByteLocks
from vllm_graft.base.log import info_once
from vllm_graft.hicache.config.cache_config import flag
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.shared_slots import SharedSlots, control_bytes
from vllm_graft.hicache.pages.pool_shape import PoolShape, Sharing

POPULATE_BYTES = 1 << 30
"""Most bytes of a shared region that one call makes present. Signals wait for the call to end."""
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which Python does not name."""
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call."""
_MPOL_PREFERRED = 1
_SYSFS = Path("/sys/bus/pci/devices")


class HostPool:
    """The memory of the host pool, mapped into this process.

    Args:
        name: name of the shared file; None maps private memory.
        node: NUMA node on which ``part`` should lie; None leaves the choice to the kernel.
        part: the bytes whose memory this process takes at once; None if it takes none.
        creates: whether this process creates the file, and deletes the ``orphans`` of killed
            engines. Exactly one process of the engine does.
        sharing: set if other engines share the file. Then any process creates it, and the control
            of its slots, ``shared``, lies behind the pages.

    Raises:
        GraftError: if there is not enough memory, or the file belongs to something else.
    """

    def __init__(
        self,
        shape: PoolShape,
        name: str | None = None,
        node: int | None = None,
        part: range | None = None,
        creates: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self.shape, self.name, self.sharing = shape, name, sharing
        self.orphans = region.remove_orphans() if creates else 0
        self._pinned: list[int] = []
        self._fd = -1
        self._inode: int | None = None
        if name is None:
            self._map = _map_private(shape.num_bytes)
        else:
            control = control_bytes(shape.num_slots) if sharing is not None else 0
            size = shape.num_bytes + control
            if sharing is not None:
                self._fd = region.join(name, size, sharing.host_bytes)
            else:
                self._fd = region.create(name, size) if creates else region.attach(name, size)
            self._inode = os.fstat(self._fd).st_ino
            self._map = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED)
            info_once(f"host KV cache: {size >> 20} MiB in {region.SHM / name}")
        with contextlib.suppress(OSError, ValueError):
            # Huge pages cause fewer TLB misses. Kernels without them refuse, which does no harm.
            self._map.madvise(mmap.MADV_HUGEPAGE)
            # A forked child must not make the pages copy-on-write while the device copies to them.
            self._map.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(self._map)
        self._anchor: ctypes.c_char | None = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        # The scheduler removes the file's name once all processes have mapped the file, unless it
        # is shared. If the engine ends before that, this finalizer removes it; it runs in
        # multiprocessing's children too. If the engine is killed, the next one removes it as an
        # orphan.
        self.shared: SharedSlots | None = None
        if name is not None:
            leave, told = (
                (region.remove, self._inode) if sharing is None else (region.leave, self._fd)
            )
            self._leave = Finalize(self, leave, (name, told), exitpriority=0)
        if node is not None and part is not None:
            prefer_node(self.address + part.start, len(part), node)
        if name is not None and part is not None:
            try:
                self._populate(part)
            except ConfigError:
                self.close()
                raise
        if sharing is not None:
            try:
                self._populate(range(shape.num_bytes, size))
                memory, locks = self._view[shape.num_bytes :], ByteLocks(self._fd)
                self.shared = SharedSlots(memory, shape.num_slots, locks, sharing.engine)
            except GraftError:
                self.close()
                raise

    def shard_address(self, shard: int) -> int:
        """Address of slot 0 of a shard."""
        return self.address + shard * self.shape.shard_bytes

    def _populate(self, part: range) -> None:
        """Make all memory of a part present now, by its own rank, next to whose GPU it lies then.

        Without it, a copy would die of SIGBUS later if the file system is full.
        """
        try:
            if part and not _populated(self._map, part.start, len(part)):
                os.posix_fallocate(self._fd, part.start, len(part))
        except OSError as error:
            raise ConfigError(
                f"{flag('host_bytes')}: {region.SHM} has no room for {len(part)} bytes any more "
                f"({error}): raise its size (docker --shm-size), or lower {flag('host_bytes')}."
            ) from None

    def page(self, shard: int, slot: int, num_bytes: int) -> memoryview:
        """The first ``num_bytes`` bytes of a slot, writable."""
        start = shard * self.shape.shard_bytes + slot * self.shape.slot_bytes
        return self._view[start : start + num_bytes]

    def pin(self, shard: int) -> None:
        """Pin a shard: register it with CUDA, so that copy engines and kernels can reach it."""
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
        if not self._pinned:
            return
        import torch

        runtime = torch.cuda.cudart()
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned.clear()

    def close(self) -> None:
        """Unpin and unmap the memory. All copies must have ended. A second call does nothing."""
        if self._anchor is None:
            return
        if self.shared is not None:
            self.shared.close()
        if self.name is not None and self.sharing is None:
            region.remove(self.name, self._inode)
        self.unpin()
        self._view.release()
        self._anchor = None
        with contextlib.suppress(BufferError):
            # A view of a page that storage still holds keeps the mapping alive until it is
            # dropped. The mapping keeps a copy of the descriptor, and so the lock.
            self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._leave.cancel()
        if self.sharing is not None:
            region.remove_unused(region.SHM / str(self.name))


def _map_private(num_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise GraftError(
            f"{num_bytes} bytes of host memory cannot be had ({error}): lower {flag('host_bytes')}."
        ) from None


def _populated(memory: mmap.mmap, start: int, size: int) -> bool:
    """Make memory present, as huge pages where possible; False if the kernel is too old for it."""
    for offset in range(start, start + size, POPULATE_BYTES):
        try:
            memory.madvise(_POPULATE_WRITE, offset, min(POPULATE_BYTES, start + size - offset))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def node_of_gpu(pci_address: str) -> int | None:
    """The NUMA node of a PCI device such as ``"0000:17:00.0"``; None if it is unknown."""
    try:
        node = int((_SYSFS / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Ask the kernel to take a range's memory from ``node``, unless it is full, on the first touch.

    The result is False if the kernel refuses.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = ctypes.c_ulong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    place = ctypes.c_void_p(address), ctypes.c_ulong(num_bytes), ctypes.c_int(_MPOL_PREFERRED)
    nodes = ctypes.byref(mask), ctypes.c_ulong(ctypes.sizeof(mask) * 8)
    failed = libc.syscall(ctypes.c_long(number), *place, *nodes, ctypes.c_uint(0))
    if failed:
        # Containers often forbid mbind. The memory still works, perhaps more slowly.
        info_once(f"host KV cache: memory is not bound to NUMA node {node} (mbind is refused)")
    return not failed
