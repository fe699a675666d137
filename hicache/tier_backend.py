"""One of vLLM's secondary tiers (``fs``, ``obj``, or anybody's) as a storage backend.

::

    "storage": {"backend": "vllm_tier", "page_bytes": "2MiB",
                "tier": {"type": "obj", "store_config": {...}}}

So that object stores and others come with the libraries that vLLM's tiers use. What a tier keeps is
our record, header and checksum included: bytes that it changes are found out, and so are those of
another namespace. What a tier can't do, this store can't either: it has no byte cap, and deletes
nothing. :meth:`VllmTierBackend.clear` hides the pages from this process and returns False.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from vllm.v1.kv_offload.base import OffloadingSpec, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from vllm_graft.errors import ConfigError
from vllm_graft.hicache.memory import machine_bytes
from vllm_graft.hicache.options import Bytes, Options, option_flag, parse
from vllm_graft.hicache.record import HEADER_BYTES, as_bytes, encode_header, storable, verify
from vllm_graft.hicache.storage import PageKey, ReadStatus, StorageBackend
from vllm_graft.hicache.tier_driver import TierDriver
from vllm_graft.seams import require_seams
from vllm_graft.values import shown

MAX_MISSING = 1 << 20
"""Keys that are remembered not to be there; when there are more, all are asked for again."""


class VllmTierOptions(Options):
    """Keys beside ``"backend": "vllm_tier"``."""

    tier: dict[str, Any]
    """A tier as in ``secondary_tiers`` of vLLM's OffloadingConnector: ``type`` and its keys."""

    page_bytes: Annotated[Bytes, Field(ge=1)]
    """The largest page; a smaller one takes as much room."""

    slots: Annotated[int, Field(ge=1, le=1024)] = 16
    """Pages on their way at once, each with memory of its own."""

    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 30.0
    """How long a read or a write may take before it counts as failed."""


class VllmTierBackend(StorageBackend):
    """Pages go through staging memory, which the tier takes for vLLM's primary tier.

    Args:
        namespace: 16 bytes; the tier is told it as the model's name.
        options: see :class:`VllmTierOptions`.
    """

    def __init__(self, namespace: bytes, options: Mapping[str, Any]) -> None:
        super().__init__(namespace, options)
        require_seams("native")
        self.options = parse(VllmTierOptions, options, "storage")
        # Direct I/O wants lengths and addresses that are multiples of a page of memory.
        page = mmap.PAGESIZE
        self._slot_bytes = -(-(self.options.page_bytes + HEADER_BYTES) // page) * page
        memory = mmap.mmap(-1, self._slot_bytes * self.options.slots)
        self._staging = memoryview(memory)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.options.slots):
            self._slots.put(slot)
        self._lock = threading.Lock()
        self._missing: set[PageKey] = set()
        self._hidden: set[PageKey] = set()
        self._epoch = 0
        view = self._staging.cast("B", (self.options.slots, self._slot_bytes))
        try:
            tier = SecondaryTierFactory.create_secondary_tier(
                self.options.tier, view, _Spec(_config(namespace))
            )
        except Exception as error:
            raise ConfigError(
                f"{option_flag('storage', 'tier')}: vLLM's tier {self.options.tier.get('type')!r} "
                f"cannot be made: {type(error).__name__}: {error}"
            ) from error
        self._driver = TierDriver(tier, self._slots.put)
        self._closed = False

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse wrong options, and a tier that vLLM does not know; its own keys are its own."""
        parsed = parse(VllmTierOptions, options, "storage")
        kind, known = parsed.tier.get("type"), sorted(SecondaryTierFactory._registry)
        if not isinstance(kind, str) or (kind not in known and "module_path" not in parsed.tier):
            raise ConfigError(
                f"{option_flag('storage', 'tier', 'type')}: {shown(kind)} is refused: vLLM has the "
                f"tiers {', '.join(known)}; for another one give its class and module_path."
            )
        if parsed.page_bytes * parsed.slots > (there := machine_bytes()):
            raise ConfigError(
                f"{option_flag('storage', 'page_bytes')} is {int(parsed.page_bytes)}, for each of "
                f"{parsed.slots} slots, but this machine has {there} bytes of memory: lower it."
            )

    @classmethod
    def too_small(cls, options: Mapping[str, Any], page_bytes: int) -> str | None:
        """Why staging memory holds no page."""
        given = parse(VllmTierOptions, options, "storage")
        if page_bytes <= given.page_bytes:
            return None
        return (
            f"{option_flag('storage', 'page_bytes')} is {int(given.page_bytes)}, but a page of KV "
            f"takes {page_bytes} bytes: give at least {page_bytes}."
        )

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """False if it is known not to be there. To know more would take I/O: it may be missed."""
        if self._closed:
            return [False] * len(keys)
        return [key not in self._missing and key not in self._hidden for key in keys]

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        """Load a page, check it, copy it."""
        buffer = as_bytes(buffer)
        with self._lock:
            epoch, gone = self._epoch, key in self._missing or key in self._hidden
        if self._closed or gone or not storable(key):
            self.counters.add("read_misses")
            return ReadStatus.MISS
        status = self._transfer(key, buffer, True, epoch)
        with self._lock:
            if self._epoch != epoch:
                status = ReadStatus.MISS
            elif status is not ReadStatus.HIT:
                self._forget(key, status)
        names = {ReadStatus.HIT: "hits", ReadStatus.MISS: "misses", ReadStatus.CORRUPT: "corrupt"}
        self.counters.add(f"read_{names.get(status, 'errors')}")
        return status

    def write(self, key: PageKey, page: memoryview) -> bool:
        """Copy a page, and store it."""
        page = as_bytes(page)
        if self._closed:
            return self._decline("closed")
        if not storable(key) or page.nbytes > self.options.page_bytes:
            return self._decline("too_large")
        with self._lock:
            epoch, hidden = self._epoch, key in self._hidden
        if hidden:
            # The tier may still have what was removed or was bad, and would keep that.
            return self._decline("removed")
        if self._transfer(key, page, False, epoch) is not ReadStatus.HIT:
            return self._decline("error")
        with self._lock:
            self._missing.discard(key)
        self.counters.add("writes")
        return True

    def remove(self, key: PageKey) -> None:
        """Hide a page from this process."""
        with self._lock:
            self._hidden.add(key)

    def flush(self) -> bool:
        """True: a write returns when the tier says that it is done; it promises no more."""
        return True

    def clear(self) -> bool:
        """Hide all pages from this process. False: a tier deletes nothing."""
        with self._lock:
            self._epoch += 1
            self._missing.clear()
            self._hidden.clear()
        return False

    def close(self) -> None:
        """Finish what runs and shut the tier down."""
        if not self._closed:
            self._closed = True
            self._driver.close(self.options.timeout_seconds)

    def _forget(self, key: PageKey, status: ReadStatus) -> None:
        """Remember what a read found out, under the lock."""
        if status is ReadStatus.CORRUPT:
            self._hidden.add(key)
            return
        if len(self._missing) >= MAX_MISSING:
            self._missing.clear()
        self._missing.add(key)

    def _transfer(self, key: PageKey, page: memoryview, load: bool, epoch: int) -> ReadStatus:
        """Move a page between ``page`` and the tier; HIT if that worked."""
        try:
            slot = self._slots.get(timeout=self.options.timeout_seconds)
        except queue.Empty:
            return ReadStatus.ERROR
        start = slot * self._slot_bytes
        staged = self._staging[start : start + HEADER_BYTES + page.nbytes]
        if not load:
            staged[:HEADER_BYTES] = encode_header(self.namespace, key, page)
            staged[HEADER_BYTES:] = page
        # After clear() names are others, so that what was before is not found.
        name = key.hash if epoch == 0 else key.hash + epoch.to_bytes(4, "big")
        operation = self._driver.run(
            make_offload_key(name, key.pool), slot, load, self.options.timeout_seconds
        )
        if operation.abandoned:
            # The tier may still use the slot: the driver frees it.
            return ReadStatus.ERROR
        status = ReadStatus.HIT if operation.success else ReadStatus.ERROR
        if load and not operation.found:
            status = ReadStatus.MISS
        if load and operation.success:
            header = bytes(staged[:HEADER_BYTES])
            if verify(header, staged[HEADER_BYTES:], self.namespace, key):
                page[:] = staged[HEADER_BYTES:]
            else:
                status = ReadStatus.CORRUPT
        self._slots.put(slot)
        return status


class _Spec(OffloadingSpec):
    """What a tier reads of an OffloadingSpec. It has neither manager nor worker."""

    def get_manager(self) -> Any:
        """Nobody asks."""
        raise TypeError("a storage backend has no manager")

    def get_worker(self, kv_caches: Any) -> Any:
        """Nobody asks."""
        raise TypeError("a storage backend has no worker")


def _config(namespace: bytes) -> OffloadingConfig:
    """One rank, one pool: all that differs is in the namespace."""
    return OffloadingConfig(
        groups=(),
        worker_kv_bytes_per_block=0,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id=namespace.hex(),
        model=OffloadingModelConfig(name=namespace.hex(), dtype="uint8"),
        cache=OffloadingCacheConfig(tokens_per_hash=1, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
