"""The ``segments`` store as a secondary tier of vLLM's own OffloadingConnector.

::

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64000000000,
        "secondary_tiers": [{
            "type": "SegmentsTier", "module_path": "vllm_graft.hicache.native.native_tier",
            "path": "/var/cache/graft", "max_bytes": "500GiB"}]}

It replaces vLLM's tier ``fs``: it has a byte limit, checks every load, recovers after a crash, and
its pages belong to certain weights. vLLM does not tell a tier that the cache was reset or that
weights were replaced. Ours hears of it from the engine core. From then on it finds no page of
before, and stores new ones where no other engine finds them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import logger
from vllm_graft.hicache.config.connector_options import flags_below
from vllm_graft.hicache.pages import engine_core, namespace
from vllm_graft.hicache.pages.namespace import Engine
from vllm_graft.hicache.pages.page_key import SALT_BYTES, PageKey, salted
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.seams.permission import require_seams

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

Transfer = Callable[[PageKey, memoryview], bool]


class SegmentsTier(SecondaryTierManager):
    """Stores chunks of the primary tier in segments, and checks them when it loads them.

    A chunk whose load fails is forgotten, so that the scheduler does not ask for it again. Lookups
    are immediate, so none returns RETRY.

    Args:
        primary_kv_view: host memory of the primary tier, ``[chunks, bytes]``.
        path: this and the next three are those of
            :class:`~vllm_graft.hicache.storage.segments.store.SegmentsOptions`.
        weights: identity of the weights. If given, the checkpoint is not read.
        enable_kv_events: whether to emit an event for each stored job, if vLLM's events are on.
        locality: ``"LOCAL"`` or ``"REMOTE"``, for the events.

    Raises:
        ConfigError: for wrong options, or if the weights cannot be identified.
        SeamError: if vLLM's API for tiers differs from the one that we know.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        path: str,
        max_bytes: int | str,
        segment_bytes: int | str | None = None,
        sync_bytes: int | str = "64MiB",
        weights: str | None = None,
        n_read_threads: int = 4,
        n_write_threads: int = 4,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **of_vllm: Any,
    ) -> None:
        require_seams("native")
        super().__init__(offloading_spec, primary_kv_view, tier_type, **of_vllm)
        self.locality = None if locality is None else Locality(locality)
        self.events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self.events = []
        elif enable_kv_events:
            logger.warning("enable_kv_events of the tier does nothing: vLLM's KV events are off.")
        options: dict[str, Any] = {"path": path, "max_bytes": max_bytes, "sync_bytes": sync_bytes}
        if segment_bytes is not None:
            options["segment_bytes"] = segment_bytes
        self._salt = b""
        core = engine_core.core_of(offloading_spec.config.model.name)
        space = tier_namespace(offloading_spec, self.block_size_bytes, weights, core)
        if problem := SegmentsBackend.too_small(options, self.block_size_bytes):
            raise ConfigError(problem)
        self.store = SegmentsBackend(space, options)
        self._bytes = primary_kv_view.cast("B")
        self._readers = ThreadPoolExecutor(n_read_threads, "graft-tier-read")
        self._writers = ThreadPoolExecutor(n_write_threads, "graft-tier-write")
        self._changed = threading.Condition()
        self._running = 0
        self._finished: list[JobResult] = []
        if core is not None:
            engine_core.listen(core, self)

    def changed(self, change: engine_core.Change) -> None:
        """Find no page of before the change any more, and store new ones for nobody else."""
        self._salt = os.urandom(SALT_BYTES)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        [there] = self.store.contains([page_key(key, self._salt)])
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._writers, job_metadata, self.store.write)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._readers, job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self.events is None:
            return []
        with self._changed:
            events, self.events = self.events, []
        return events

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job reads or writes the primary tier's memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def shutdown(self) -> None:
        """Drop queued jobs, wait for running ones, and flush and close the store."""
        for pool in (self._readers, self._writers):
            pool.shutdown(cancel_futures=True)
        self.store.close()

    def _submit(self, pool: ThreadPoolExecutor, job: TransferJob, transfer: Transfer) -> None:
        with self._changed:
            self._running += 1
        try:
            # The salt is that of now, as the job's K/V may be outdated when a thread takes it up.
            future = pool.submit(self._run, job, transfer, self._salt)
        except RuntimeError:
            self._end(JobResult(job_id=job.job_id, success=False))
        else:
            future.add_done_callback(lambda done: self._dropped(done, job))

    def _dropped(self, done: Future[None], job: TransferJob) -> None:
        """Let a job fail that a shutdown has dropped from the queue."""
        if done.cancelled():
            self._end(JobResult(job_id=job.job_id, success=False))

    def _end(self, result: JobResult, event: OffloadingEvent | None = None) -> None:
        with self._changed:
            if self.events is not None and event is not None:
                self.events.append(event)
            self._finished.append(result)
            self._running -= 1
            self._changed.notify_all()

    def _run(self, job: TransferJob, transfer: Transfer, salt: bytes) -> None:
        start, keys = time.perf_counter(), list(job.keys)
        done: list[OffloadKey] = []
        try:
            done = [
                key
                for key, chunk in zip(keys, job.chunk_ids)
                if transfer(page_key(key, salt), self._chunk(int(chunk)))
            ]
        except Exception:
            # An IndexError of a chunk is expected. Whatever else it is, vLLM waits for a result of
            # each job, and drain_jobs() for its end.
            logger.exception("Job %d of the tier failed.", job.job_id)
        loading, success = transfer == self._load, len(done) == len(keys)
        result = JobResult(
            job_id=job.job_id,
            success=success,
            successful_keys=tuple(done) if loading and done and not success else None,
            transfer_time=time.perf_counter() - start,
            transfer_bytes=len(done) * self.block_size_bytes,
        )
        event = OffloadingEvent(keys, self.medium, removed=False, locality=self.locality)
        self._end(result, event if success and not loading else None)

    def _load(self, key: PageKey, chunk: memoryview) -> bool:
        return self.store.read(key, chunk) is ReadStatus.HIT

    def _chunk(self, chunk: int) -> memoryview:
        start = chunk * self.block_size_bytes
        if start < 0 or start + self.block_size_bytes > self._bytes.nbytes:
            raise IndexError(f"chunk {chunk} is not in the primary tier")
        return self._bytes[start : start + self.block_size_bytes]


def page_key(key: OffloadKey, salt: bytes = b"") -> PageKey:
    """Our key for vLLM's key: its hash, which a salt may change, and its KV cache group."""
    return PageKey(salted(get_offload_block_hash(key), salt), get_offload_group_idx(key))


def tier_namespace(spec: OffloadingSpec, chunk_bytes: int, weights: str | None, core: Any) -> bytes:
    """The namespace of a tier's chunks: the inputs of K/V, and what vLLM tells a tier of chunks.

    Without an engine core to read the inputs from, ``weights`` has to stand for them.

    Raises:
        ConfigError: if the inputs cannot be told, and ``weights`` is not given.
    """
    config: Any = spec.config
    return namespace.digest(
        {
            "inputs": _inputs(config.model.name, weights, core),
            "tier": "native",
            "dtype": config.model.dtype,
            "chunk_bytes": chunk_bytes,
            "cache": config.cache,
            "groups": [str(group) for group in config.groups],
            "parallel": _geometry(config),
            "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        }
    )


def _inputs(model: str, weights: str | None, core: Any) -> dict[str, Any]:
    """The inputs of K/V, apart from those that vLLM's spec tells."""
    if core is not None:
        attention = engine_core.ask_attention(core)
        engine = Engine(core.vllm_config, weights, attention=attention, holds_adapters=True)
        with flags_below("secondary_tiers[...]"):
            # vLLM tells the pools as groups, and its connector may share chunks among ranks.
            return namespace.inputs(engine, without=(*namespace.POOLS, *namespace.SHARING))
    if weights is None:
        raise ConfigError(
            f"secondary_tiers[...].weights: no engine core of this process serves {model!r}, so "
            "its weights and settings can't be told from others. Give a text that changes "
            "whenever they do."
        )
    others = [row.name for row in namespace.INPUTS if row.name not in namespace.SOFTWARE]
    return {**namespace.inputs(Engine(None), without=others), "weights": weights}


def _geometry(config: Any) -> dict[str, int]:
    """How chunks are divided among ranks, unless all ranks hold the same bytes."""
    parallel = config.parallel
    names = ["tp_size", "pp_size", "pcp_size", "dcp_size"]
    if parallel.is_parallelism_agnostic or config.replicated_layout:
        names = []
    return {name: getattr(parallel, name) for name in [*names, "data_parallel_index"]}
