"""The ``segments`` store as a secondary tier of vLLM's own OffloadingConnector.

::

    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64000000000,
        "secondary_tiers": [{
            "type": "SegmentsTier", "module_path": "vllm_graft.hicache.native_tier",
            "path": "/var/cache/graft", "max_bytes": "500GiB"}]}

In place of vLLM's ``fs``: bounded, checked on every load, recovered after a crash, and bound to the
weights. vLLM's API for tiers is experimental, and has no way to say that the cache was reset: after
``reset_prefix_cache(reset_connector=True)`` a tier keeps its pages (ours too; use HiCacheConnector
where weights change while the engine runs).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
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

from vllm_graft.errors import ConfigError
from vllm_graft.hicache.namespace import digest
from vllm_graft.hicache.record import FORMAT
from vllm_graft.hicache.segments.backend import SegmentsBackend
from vllm_graft.hicache.storage import PageKey, ReadStatus, StorageBackend
from vllm_graft.hicache.weights import checkpoint_fingerprint
from vllm_graft.log import logger
from vllm_graft.seams import require_seams

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector


class SegmentsTier(SecondaryTierManager):
    """Stores chunks of the primary tier in segments, and loads them checked.

    A chunk that fails is forgotten, so that the scheduler does not ask for it again. A look-up is
    one in a dict: no chunk is ever RETRY.

    Args:
        offloading_spec: vLLM's; its model, pools and geometry make the namespace.
        primary_kv_view: the host memory of the primary tier, ``[chunks, bytes]``.
        tier_type: vLLM's name for the tier.
        path: as :class:`~vllm_graft.hicache.segments.options.SegmentsOptions` says.
        max_bytes: likewise.
        segment_bytes: likewise.
        sync_bytes: likewise.
        weights: identity of the weights, in place of looking at the checkpoint. Give one that
            names the quantisation where ``--quantization`` quantises while loading: vLLM does not
            tell a tier.
        n_read_threads: that load.
        n_write_threads: that store.
        enable_kv_events: emit an event for each stored job, if vLLM's events are on at all.
        locality: ``"LOCAL"`` or ``"REMOTE"``, for the events.
        backpressure_detector: vLLM's.

    Raises:
        ConfigError: for wrong options, or weights that can't be told from others.
        SeamError: for a vLLM whose API for tiers is another one.
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
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        require_seams("native")
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self.events: list[OffloadingEvent] | None = None
        if enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self.events = []
        elif enable_kv_events:
            logger.warning("enable_kv_events of the tier does nothing: vLLM's KV events are off.")
        options: dict[str, Any] = {"path": path, "max_bytes": max_bytes, "sync_bytes": sync_bytes}
        if segment_bytes is not None:
            options["segment_bytes"] = segment_bytes
        space = tier_namespace(offloading_spec, self.block_size_bytes, weights)
        if problem := SegmentsBackend.too_small(options, self.block_size_bytes):
            raise ConfigError(problem)
        self.store = self.open_store(space, options)
        self._bytes = primary_kv_view.cast("B")
        self._readers = ThreadPoolExecutor(n_read_threads, "graft-tier-read")
        self._writers = ThreadPoolExecutor(n_write_threads, "graft-tier-write")
        self._changed = threading.Condition()
        self._running = 0
        self._finished: list[JobResult] = []

    def open_store(self, namespace: bytes, options: Mapping[str, Any]) -> StorageBackend:
        """The store of a namespace."""
        return SegmentsBackend(namespace, options)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether the store's index has the chunk."""
        [there] = self.store.contains([page_key(key)])
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue a job that writes chunks."""
        self._submit(self._writers, job_metadata, self._store)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue a job that reads chunks."""
        self._submit(self._readers, job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that finished since the last call."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events of stored jobs since the last call."""
        if self.events is None:
            return []
        with self._changed:
            events, self.events = self.events, []
        return events

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing special is wanted of any request."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job reads or writes the primary tier's memory."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def shutdown(self) -> None:
        """Drop queued jobs, wait for those that run, make the store durable, release it."""
        for pool in (self._readers, self._writers):
            pool.shutdown(cancel_futures=True)
        self.store.close()

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        job: TransferJob,
        transfer: Callable[[TransferJob, Sequence[OffloadKey]], list[OffloadKey]],
    ) -> None:
        with self._changed:
            self._running += 1
        try:
            future = pool.submit(self._run, job, transfer)
        except RuntimeError:
            self._end(JobResult(job_id=job.job_id, success=False))
        else:
            future.add_done_callback(lambda done: self._dropped(done, job))

    def _dropped(self, done: Future[None], job: TransferJob) -> None:
        """A shutdown has dropped the job from the queue: it has failed."""
        if done.cancelled():
            self._end(JobResult(job_id=job.job_id, success=False))

    def _end(self, result: JobResult, event: OffloadingEvent | None = None) -> None:
        with self._changed:
            if self.events is not None and event is not None:
                self.events.append(event)
            self._finished.append(result)
            self._running -= 1
            self._changed.notify_all()

    def _run(
        self,
        job: TransferJob,
        transfer: Callable[[TransferJob, Sequence[OffloadKey]], list[OffloadKey]],
    ) -> None:
        start, keys = time.perf_counter(), list(job.keys)
        done: list[OffloadKey] = []
        try:
            done = transfer(job, keys)
        except Exception:
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

    def _store(self, job: TransferJob, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [
            key
            for key, chunk in zip(keys, job.chunk_ids)
            if self.store.write(page_key(key), self._chunk(int(chunk)))
        ]

    def _load(self, job: TransferJob, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        return [
            key
            for key, chunk in zip(keys, job.chunk_ids)
            if self.store.read(page_key(key), self._chunk(int(chunk))) is ReadStatus.HIT
        ]

    def _chunk(self, chunk: int) -> memoryview:
        start = chunk * self.block_size_bytes
        if start < 0 or start + self.block_size_bytes > self._bytes.nbytes:
            raise IndexError(f"chunk {chunk} is not in the primary tier")
        return self._bytes[start : start + self.block_size_bytes]


def page_key(key: OffloadKey) -> PageKey:
    """Our name for vLLM's key: hash, and KV cache group."""
    return PageKey(get_offload_block_hash(key), get_offload_group_idx(key))


def tier_namespace(spec: OffloadingSpec, chunk_bytes: int, weights: str | None) -> bytes:
    """The namespace, as far as vLLM tells a tier.

    Raises:
        ConfigError: if the weights are not on a local disk, and ``weights`` is not given.
    """
    config: Any = spec.config
    return digest(
        {
            "format": FORMAT,
            "tier": "native",
            "weights": weights or _weights(config.model.name),
            "dtype": config.model.dtype,
            "chunk_bytes": chunk_bytes,
            "cache": config.cache,
            "groups": [str(group) for group in config.groups],
            "parallel": _geometry(config),
            "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        }
    )


def _geometry(config: Any) -> dict[str, int]:
    """How chunks are cut, which is of no account where their bytes are the same for all.

    Replicas of data parallelism have a directory each: one process may have it open.
    """
    parallel = config.parallel
    names = ["tp_size", "pp_size", "pcp_size", "dcp_size"]
    if parallel.is_parallelism_agnostic or config.replicated_layout:
        names = []
    return {name: getattr(parallel, name) for name in [*names, "data_parallel_index"]}


def _weights(model: str) -> str:
    try:
        return checkpoint_fingerprint(Path(model)).hex()
    except OSError as error:
        raise ConfigError(
            f"secondary_tiers[...].weights: the weights of {model!r} can't be told from others "
            f"({error}). Give a text that changes whenever they do, such as a revision."
        ) from error
