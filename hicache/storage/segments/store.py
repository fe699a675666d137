"""The ``segments`` store. It has a byte limit, recovers after a crash, and checks every read."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import ByteSize, Field, model_validator

from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.options import Bytes
from vllm_graft.hicache.config.connector_options import (
    Folder,
    Options,
    option_flag,
    parse_options,
)
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments.directory import Directory, require_folder
from vllm_graft.hicache.storage.segments.format import Entry, storable
from vllm_graft.hicache.storage.segments.neighbours import holders
from vllm_graft.hicache.storage.segments.segment import DataLostError, Segment, bytes_alone
from vllm_graft.hicache.storage.segments.space import Space

FAILURES_TOLD = 32
"""Failed writes in a row after which the log says so."""

_MIB = 1 << 20


class SegmentsOptions(Options):
    """Keys beside ``"backend": "segments"``."""

    path: Folder
    """Directory on a local disk, in which each namespace has its own directory."""

    max_bytes: Annotated[Bytes, Field(ge=_MIB)]
    """Most bytes that all segments in the directory may take: those of all namespaces, whichever
    process has them open. See `neighbours`."""

    segment_bytes: Annotated[Bytes, Field(ge=64 << 10)] | None = None
    """Most bytes per segment, at most half of ``max_bytes``. Pages are evicted by whole segments.
    None stands for 1/256 of ``max_bytes``, but at least 64 MiB and at most 1/8 of ``max_bytes``."""

    sync_bytes: Annotated[Bytes, Field(ge=0)] = ByteSize(64 * _MIB)
    """Bytes that may be written before they are made durable. A power failure may lose them."""

    @model_validator(mode="after")
    def _two_segments(self) -> Self:
        if self.segment_bytes is not None and 2 * self.segment_bytes > self.max_bytes:
            raise ValueError(
                f"segment_bytes {int(self.segment_bytes)} is over half of max_bytes "
                f"{int(self.max_bytes)}"
            )
        return self

    @property
    def segment_size(self) -> int:
        """``segment_bytes``, or its default."""
        if self.segment_bytes is not None:
            return int(self.segment_bytes)
        return min(max(64 * _MIB, self.max_bytes // 256), self.max_bytes // 8)


class SegmentsBackend(StorageBackend):
    """Keeps pages as checked records in append-only segments below one directory. After
    ``sync_bytes`` bytes, or on :meth:`flush`, the data is made durable, and then the index. The
    thread that wrote the last bytes does this while other threads go on. A page can be read as soon
    as its write has returned. ``files`` makes the system calls."""

    OPTIONS: ClassVar[type[SegmentsOptions]] = SegmentsOptions

    def __init__(
        self, namespace: bytes, options: Mapping[str, Any], files: Files | None = None
    ) -> None:
        super().__init__(namespace, options)
        self.options = parse_options(self.OPTIONS, options, "storage")
        self.files = files if files is not None else Files()
        self._lock = threading.Lock()
        self._commits = threading.Lock()
        self._uncommitted = 0
        self._closed = False
        self._failures = 0
        self._directory = Directory(self.options.path, namespace)
        try:
            self._space = Space(
                self._directory,
                namespace,
                self.files,
                self.counters,
                int(self.options.max_bytes),
                self.options.segment_size,
            )
        except BaseException:
            self._directory.close()
            raise

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        given = parse_options(cls.OPTIONS, options, "storage")
        require_folder(given.path, int(given.max_bytes))

    @classmethod
    def open_elsewhere(cls, options: Mapping[str, Any]) -> Mapping[bytes, int]:
        return holders(parse_options(cls.OPTIONS, options, "storage").path)

    @classmethod
    def too_small(cls, options: Mapping[str, Any], page_bytes: int) -> str | None:
        given = parse_options(cls.OPTIONS, options, "storage")
        needed = bytes_alone(page_bytes)
        if needed <= given.segment_size:
            return None
        which = "max_bytes" if given.segment_bytes is None else "segment_bytes"
        return (
            f"{option_flag('storage', which)} is {int(getattr(given, which))}, so a segment has "
            f"{given.segment_size} bytes, but a page of KV takes {needed} of one: give "
            f"segment_bytes of at least {needed}, and max_bytes of at least {2 * needed}."
        )

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        # It takes no lock, because dict lookups are atomic.
        index = self._space.index
        return [key in index for key in keys]

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        buffer = _as_bytes(buffer)
        with self._lock:
            location = self._space.index.get(key)
            if location is not None:
                self._space.use(location[0])
                location[0].users += 1
        if location is None:
            self.counters.add("read_misses")
            return ReadStatus.MISS
        segment, entry = location
        status = ReadStatus.CORRUPT
        with self._user(segment):
            if entry.length == buffer.nbytes:
                status = segment.read(self.files, entry, buffer)
        if segment.dropped:
            # The store was cleared during the read: no page of before may be seen any more.
            self.counters.add("read_misses")
            return ReadStatus.MISS
        if status is ReadStatus.HIT:
            self.counters.add("read_hits")
            self.counters.add("read_bytes", buffer.nbytes)
            return status
        self.counters.add("read_corrupt" if status is ReadStatus.CORRUPT else "read_errors")
        with self._lock:
            self._space.forget(key, location)
        return status

    def write(self, key: PageKey, page: memoryview) -> bool:
        page = _as_bytes(page)
        if not storable(key) or not self._space.fits(page.nbytes):
            return self._decline("too_large")
        try:
            return self._write(key, page)
        except OSError as error:
            if not self._relieved(error):
                return self._failed(error)
        try:
            return self._write(key, page)
        except OSError as error:
            # What was freed has gone to others. Pages are declined for a while, so that they do not
            # take all of the store's room at once.
            self._space.pause()
            return self._failed(error)

    def remove(self, key: PageKey) -> None:
        with self._lock:
            if not self._closed and self._space.forget(key):
                self.counters.add("removed")

    def flush(self) -> bool:
        with self._commits:
            return self._commit()

    def clear(self) -> bool:
        with self._commits, self._lock:
            if self._closed:
                return False
            self._uncommitted = 0
            deleted = self._space.drop_all()
        if deleted:
            try:
                self.files.sync_directory(self._directory.path)
            except OSError:
                deleted = False
        if not deleted:
            self.counters.add("clear_errors")
            logger.warning("The KV store below %s could not be cleared.", self._directory.path)
        return deleted

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.flush()
        with self._commits, self._lock:
            self._space.close()
            self._directory.close()

    def stats(self) -> dict[str, int]:
        """Counters, and the gauges ``pages``, ``bytes``, ``segments``, ``uncommitted_bytes``."""
        with self._lock:
            gauges = {
                "pages": len(self._space.index),
                "bytes": self._space.bytes,
                "segments": self._space.segments,
                "uncommitted_bytes": self._uncommitted,
            }
        return self.counters.snapshot() | gauges

    def _write(self, key: PageKey, page: memoryview) -> bool:
        with self._lock:
            if self._closed:
                return self._decline("closed")
            found = self._space.index.get(key)
            if found is not None and found[1].length == page.nbytes:
                self.counters.add("writes_present")
                return True
            room = self._space.reserve(self.files, page.nbytes)
            self.full = room is None
        if room is None:
            return self._decline("full")
        segment, offset = room
        entry = Entry(key, offset, page.nbytes)
        with self._user(segment):
            try:
                segment.write_at(self.files, offset, key, page)
            except OSError:
                self._take_back(segment, entry)
                raise
            if not self._added(segment, entry):
                return self._decline("dropped")
        self._failures = 0
        self.counters.add("writes")
        self.counters.add("write_bytes", page.nbytes)
        self._commit_if_due()
        return True

    def _relieved(self, error: OSError) -> bool:
        with self._lock:
            return not self._closed and self._space.relieve(self.files, error)

    @contextlib.contextmanager
    def _user(self, segment: Segment) -> Iterator[None]:
        """On exit, decrease ``users``, which the caller has increased under the lock."""
        try:
            yield
        finally:
            with self._lock:
                segment.users -= 1
                self._space.close_unused(segment)

    def _added(self, segment: Segment, entry: Entry) -> bool:
        with self._lock:
            segment.writing -= 1
            if segment.dropped:
                return False
            self._space.add(segment, entry)
            self._uncommitted += entry.length
            return True

    def _take_back(self, segment: Segment, entry: Entry) -> None:
        """Free the room of a failed write, unless another record follows it."""
        with self._lock:
            segment.writing -= 1
            if segment.size == entry.end and not segment.dropped:
                segment.shorten(entry.offset)

    def _commit_if_due(self) -> None:
        """Commit if ``sync_bytes`` were written and no other thread is committing."""
        if self._uncommitted >= self.options.sync_bytes and self._commits.acquire(blocking=False):
            try:
                self._commit()
            finally:
                self._commits.release()

    def _commit(self) -> bool:
        """Make all pending entries durable. The caller holds ``_commits``."""
        with self._lock:
            self._space.give_way()
            batches = [(segment, segment.pending) for segment in self._space.dirty]
            for segment, entries in batches:
                segment.pending = []
                segment.committing = len(entries)
                segment.users += 1
            self._space.dirty.clear()
            self._uncommitted = 0
        done = [self._commit_batch(segment, entries) for segment, entries in batches]
        return all(done)

    def _commit_batch(self, segment: Segment, entries: list[Entry]) -> bool:
        with self._user(segment):
            try:
                segment.commit(self.files, entries)
                segment.committing = 0
                self.counters.add("commits")
                return True
            except DataLostError as error:
                if segment.dropped:
                    # The segment was evicted meanwhile, so nothing is left to make durable.
                    return True
                logger.warning("A segment of the KV store is lost: %s", error)
                self.counters.add("lost_segments")
                with self._lock:
                    self._space.drop(segment)
                self._relieved(error)
            except OSError as error:
                # The pages can be read. The next commit writes their entries again.
                logger.warning("The index of the KV store could not be written: %s", error)
                self.counters.add("commit_errors")
                with self._lock:
                    segment.committing = 0
                    if not segment.dropped:
                        segment.pending = entries + segment.pending
                        self._space.dirty.add(segment)
                self._relieved(error)
        return False

    def _failed(self, error: OSError) -> bool:
        self.counters.add("write_errors")
        logger.debug("A page could not be written: %s", error)
        self._failures += 1
        if self._failures == FAILURES_TOLD:
            warning_once(
                f"The last {FAILURES_TOLD} pages could not be written below "
                f"{self._directory.path} ({error.strerror}). The engine goes on without them."
            )
        return self._decline("error")


def _as_bytes(view: memoryview) -> memoryview:
    return view if view.ndim == 1 and view.format == "B" else view.cast("B")
