"""The segments of a store: where records go, and which segments are deleted to make room."""

import contextlib
import errno
import itertools
import time

from vllm_graft.base.log import logger, warning_once
from vllm_graft.base.metric import Counters
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments.directory import Directory
from vllm_graft.hicache.storage.segments.format import HEADER_BYTES, Entry
from vllm_graft.hicache.storage.segments.neighbours import Held, Neighbours, delete_closed
from vllm_graft.hicache.storage.segments.recovery import recover
from vllm_graft.hicache.storage.segments.segment import (
    OVERHEAD_BYTES,
    Segment,
    bytes_alone,
    segment_numbers,
    unlink_segment,
)

FULL_SECONDS = 1.0
"""Seconds for which a full store declines pages before it looks for room again."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

Location = tuple[Segment, Entry]
"""The place of a page."""


class Space:
    """The segments of a namespace, within a byte limit: the `active` one for new records, the
    `sealed` ones by number, and those with entries to commit (`dirty`). Call it under the lock."""

    def __init__(
        self, directory: Directory, namespace: bytes, files: Files, counters: Counters,
        max_bytes: int, segment_bytes: int,
    ) -> None:  # fmt: skip
        self.index: dict[PageKey, Location] = {}
        self.active: Segment | None = None
        self.sealed: dict[int, Segment] = {}
        self.dirty: set[Segment] = set()
        self._directory, self._namespace, self._counters = directory, namespace, counters
        self._max_bytes, self._segment_bytes = max_bytes, segment_bytes
        self._next = 1
        self._ticks = itertools.count()
        self._full_until = 0.0
        self._recover(files)
        with contextlib.suppress(OSError):
            # On a full disk the claim fails, but pages can still be read.
            self._make_room(0)

    @property
    def bytes(self) -> int:
        active = self.active.bytes if self.active is not None else 0
        return active + sum(segment.bytes for segment in self.sealed.values())

    @property
    def segments(self) -> int:
        return len(self.sealed) + (self.active is not None)

    def fits(self, length: int) -> bool:
        """Whether a page of ``length`` bytes fits into an empty segment."""
        return bytes_alone(length) <= self._segment_bytes

    def reserve(self, files: Files, length: int) -> tuple[Segment, int] | None:
        """Reserve room for a page of ``length`` bytes. Returns the segment, in whose ``users`` and
        ``writing`` the caller is counted, and the offset of the record. None if a new segment is
        needed and there is no room for it."""
        segment = self.active
        needed = length + OVERHEAD_BYTES
        if segment is not None and segment.most_bytes + needed > self._segment_bytes:
            self.seal()
            segment = None
        if segment is None:
            if not self._has_room(files):
                return None
            segment = Segment.create(files, self._directory.path, self._next, self._namespace)
            self._next += 1
            self.active = segment
            self.use(segment)
        offset = segment.size
        segment.size += length + HEADER_BYTES
        segment.users += 1
        segment.writing += 1
        return segment, offset

    def relieve(self, files: Files, error: OSError) -> bool:
        """Do what helps after the medium has refused a write; return whether a second try is due.
        If a file may not grow any further, records go to the next one. If the disk or a quota is
        full below our own limit, our segment that was unused longest is deleted."""
        if self._directory.removed():
            return self._renew(files)
        if error.errno not in (*_NO_ROOM, errno.EFBIG):
            return False
        last = self.active
        self.seal()
        if last is not None and not last.keys and not last.writing:
            # Even an empty file takes no page, so another one would not either.
            self.drop(last)
            last = None
        if error.errno == errno.EFBIG:
            return last is not None
        return self._evict_oldest()

    def pause(self) -> None:
        """Decline pages that need a new segment for a while."""
        self._full_until = time.monotonic() + FULL_SECONDS

    def give_way(self) -> None:
        """Delete surplus bytes if another namespace was opened or wishes for more."""
        with contextlib.suppress(OSError):
            if self._directory.neighbours_changed():
                self._make_room(0)

    def use(self, segment: Segment) -> None:
        segment.tick = next(self._ticks)

    def add(self, segment: Segment, entry: Entry) -> None:
        """Index a written record, which waits for its commit but can be read now."""
        self._place(segment, entry)
        self._append(segment, entry)

    def forget(self, key: PageKey, location: Location | None = None) -> bool:
        """Remove a page, if given a ``location`` only from there; return whether it was removed."""
        found = self.index.get(key)
        if found is None or (location is not None and found != location):
            return False
        del self.index[key]
        self._append(found[0], Entry(key, 0, 0))
        return True

    def seal(self) -> None:
        """Let the active segment get no more records."""
        if self.active is not None:
            self.use(self.active)
            self.sealed[self.active.number] = self.active
            self.active = None

    def drop(self, segment: Segment) -> bool:
        """Delete a segment and forget its pages; False if the medium refused to delete it. Where
        the directory was removed, a file of its name may be another process's, and stays."""
        segment.dropped = True
        self.sealed.pop(segment.number, None)
        if self.active is segment:
            self.active = None
        self.dirty.discard(segment)
        for key in segment.keys:
            # The page may have been written to another segment again.
            if (found := self.index.get(key)) is not None and found[0] is segment:
                del self.index[key]
                self._counters.add("dropped_pages")
        self.close_unused(segment)
        place = self._directory
        if deleted := (place.removed() or unlink_segment(place.path, segment.number)):
            self._counters.add("deleted_segments")
        return deleted

    def drop_all(self) -> bool:
        """Delete all segments of the namespace, even unknown ones; False if a file remains."""
        self._drop_known()
        if self._directory.removed() and not self._directory.renew():
            return False
        return self._directory.delete_files()

    def _drop_known(self) -> None:
        self.seal()
        for segment in list(self.sealed.values()):
            self.drop(segment)

    def close(self) -> None:
        """Forget all pages, and close each file as soon as no thread uses it."""
        self.seal()
        for segment in self.sealed.values():
            segment.dropped = True
            self.close_unused(segment)
        self.sealed.clear()
        self.dirty.clear()
        self.index.clear()

    def close_unused(self, segment: Segment) -> None:
        """Close the file of a dropped segment if no thread uses it."""
        if segment.dropped and segment.users == 0:
            segment.close()

    def _place(self, segment: Segment, entry: Entry) -> None:
        older = self.index.get(entry.key)
        if older is not None and older[0] is not segment:
            # Note that the older record is removed. Otherwise it would come back if the newer one
            # is removed and the store is opened again.
            self._append(older[0], Entry(entry.key, 0, 0))
        self.index[entry.key] = (segment, entry)
        segment.keys.add(entry.key)

    def _append(self, segment: Segment, entry: Entry) -> None:
        segment.pending.append(entry)
        self.dirty.add(segment)

    def _has_room(self, files: Files) -> bool:
        """Whether there is room for a new segment. After a failure it does not look for a while."""
        if time.monotonic() < self._full_until:
            return False
        # Without the lock of its directory, a store must not make files in it.
        if self._directory.removed() and not self._renew(files):
            return False
        if self._make_room(self._segment_bytes):
            return True
        self.pause()
        warning_once(
            f"{self._directory.path.parent} has no room for a segment of {self._segment_bytes} "
            "bytes: other namespaces are open there. No page is stored until they make room."
        )
        return False

    def _make_room(self, needed: int) -> bool:
        """Claim ``needed`` bytes more; False if that is impossible. To make room, it deletes our
        own surplus, and then namespaces that no process has open."""
        with self._directory.root_locked() as alone:
            if not alone:
                return False
            others = self._directory.neighbours()
            wish = self._most_bytes() + needed
            limit = others.limit(self._max_bytes)
            self._evict(limit - needed)
            left = self._delete_closed(others, needed)
            # Files that could not be deleted take room as well.
            self._evict(others.unclaimed(self._max_bytes) - left - needed)
            own = self._most_bytes()
            granted = own + needed <= min(limit, others.unclaimed(self._max_bytes) - left)
            claim = own + needed if granted else own
            self._directory.claim(Held(claim, max(claim, wish)))
        return granted

    def _most_bytes(self) -> int:
        """Bytes that this namespace will take once the active segment is full."""
        numbers = set(self.sealed)
        most = sum(segment.most_bytes for segment in self.sealed.values())
        if self.active is not None:
            numbers.add(self.active.number)
            most += max(self._segment_bytes, self.active.most_bytes)
        return most + self._directory.bytes_besides(numbers)

    def _evict(self, limit: int) -> None:
        while self._most_bytes() > limit and self.segments:
            if not self.sealed:
                self.seal()
            self._evict_oldest()

    def _evict_oldest(self) -> bool:
        """Delete the sealed segment that was unused longest; False if none could be deleted."""
        if not self.sealed:
            return False
        victim = min(self.sealed.values(), key=lambda segment: segment.tick)
        self._counters.add("evicted_segments")
        return self.drop(victim)

    def _renew(self, files: Files) -> bool:
        """Give up what was in a removed directory, and make it anew."""
        self._drop_known()
        self._counters.add("renewed_directories")
        logger.warning("%s was removed; it is made anew.", self._directory.path)
        if not self._directory.renew():
            self.pause()
            return False
        self._recover(files)
        return True

    def _delete_closed(self, others: Neighbours, needed: int) -> int:
        """Delete surplus bytes of namespaces that no process has open; return the bytes left."""
        there = sum(one.bytes for one in others.closed)
        room = others.unclaimed(self._max_bytes) - self._most_bytes() - needed
        deleted = delete_closed(others.closed, there - room) if there > room else 0
        self._counters.add("deleted_bytes_of_others", deleted)
        return there - deleted

    def _recover(self, files: Files) -> None:
        for number in segment_numbers(self._directory.path):
            self._next = number + 1
            try:
                found = recover(files, self._directory.path, number, self._namespace)
            except OSError as error:
                logger.warning("Segment %016x of the KV store can't be read: %s", number, error)
                self._counters.add("unreadable_segments")
                continue
            self._counters.add("salvaged_pages", found.salvaged)
            self._counters.add("cut_bytes", found.cut_bytes)
            if found.segment is not None:
                self.sealed[number] = found.segment
                self.use(found.segment)
                for entry in found.entries.values():
                    self._place(found.segment, entry)
            elif found.foreign:
                logger.warning("Segment %016x is of a newer format and left alone.", number)
                self._counters.add("foreign_segments")
            else:
                self._counters.add("broken_segments")
                unlink_segment(self._directory.path, number)
        self._counters.add("recovered_pages", len(self.index))
