"""The segments of a store: which exist, which gets the next record, which leaves for it."""

from __future__ import annotations

import contextlib
import itertools
import time

from vllm_graft.hicache.files import Files
from vllm_graft.hicache.record import HEADER_BYTES
from vllm_graft.hicache.segments.directory import Directory
from vllm_graft.hicache.segments.format import FILE_HEADER_BYTES, Entry
from vllm_graft.hicache.segments.neighbours import Held, Neighbours, delete_closed
from vllm_graft.hicache.segments.recovery import recover
from vllm_graft.hicache.segments.segment import (
    OVERHEAD_BYTES,
    Segment,
    segment_numbers,
    unlink_segment,
)
from vllm_graft.hicache.storage import Counters, PageKey
from vllm_graft.log import logger, warning_once

FULL_SECONDS = 1.0
"""How long a store that has no room declines pages before it looks again."""

Location = tuple[Segment, Entry]
"""Where a page is."""


class Space:
    """Segments within a byte cap. Every method is called under the store's lock.

    Attributes:
        index: where each page is.
        active: the segment that grows; None before the first write.
        sealed: the others.
        dirty: segments with entries to commit.
    """

    def __init__(
        self,
        directory: Directory,
        namespace: bytes,
        files: Files,
        counters: Counters,
        max_bytes: int,
        segment_bytes: int,
    ) -> None:
        self.index: dict[PageKey, Location] = {}
        self.active: Segment | None = None
        self.sealed: dict[int, Segment] = {}
        self.dirty: set[Segment] = set()
        self._directory = directory
        self._namespace = namespace
        self._counters = counters
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._next = 1
        self._ticks = itertools.count()
        self._full_until = 0.0
        self._recover(files)
        with contextlib.suppress(OSError):
            # A full disk takes no claim, and can be read.
            self._make_room(0)

    @property
    def bytes(self) -> int:
        """Bytes on the medium, of this namespace."""
        active = self.active.bytes if self.active is not None else 0
        return active + sum(segment.bytes for segment in self.sealed.values())

    @property
    def segments(self) -> int:
        """Segments that exist."""
        return len(self.sealed) + (self.active is not None)

    def fits(self, length: int) -> bool:
        """Whether a page of ``length`` bytes can ever be kept."""
        return length + OVERHEAD_BYTES + 2 * FILE_HEADER_BYTES <= self._segment_bytes

    def reserve(self, files: Files, length: int) -> tuple[Segment, int] | None:
        """Room for a page: a segment, counted as used and written to, and the record's offset.

        Returns:
            None if a new segment is needed and there is no room for it.

        Raises:
            OSError: if it can't be made.
        """
        segment = self.active
        needed = length + OVERHEAD_BYTES
        if segment is not None and segment.most_bytes + needed > self._segment_bytes:
            self.seal()
            segment = None
        if segment is None:
            if not self._has_room():
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

    def give_way(self) -> None:
        """Delete what is too much, if another namespace has come or wishes for more."""
        with contextlib.suppress(OSError):
            if self._directory.neighbours_changed():
                self._make_room(0)

    def use(self, segment: Segment) -> None:
        """Note that a page of ``segment`` was asked for."""
        segment.tick = next(self._ticks)

    def add(self, segment: Segment, entry: Entry) -> None:
        """A record was written: it can be read, and waits for its commit."""
        self._place(segment, entry)
        self._append(segment, entry)

    def forget(self, key: PageKey, location: Location | None = None) -> bool:
        """Take ``key`` out of the index, if it is (still) at ``location``; and off the disk's."""
        found = self.index.get(key)
        if found is None or (location is not None and found != location):
            return False
        del self.index[key]
        self._append(found[0], Entry(key, 0, 0))
        return True

    def seal(self) -> None:
        """Let the active segment grow no more."""
        if self.active is not None:
            self.use(self.active)
            self.sealed[self.active.number] = self.active
            self.active = None

    def drop(self, segment: Segment) -> bool:
        """Delete a segment and forget its pages; False if the medium refused to delete it."""
        segment.dropped = True
        self.sealed.pop(segment.number, None)
        if self.active is segment:
            self.active = None
        self.dirty.discard(segment)
        for key in segment.keys:
            # The page may have been written again, to another segment.
            if (found := self.index.get(key)) is not None and found[0] is segment:
                del self.index[key]
                self._counters.add("dropped_pages")
        self.close_unused(segment)
        if deleted := segment.unlink():
            self._counters.add("deleted_segments")
        return deleted

    def drop_all(self) -> bool:
        """Delete every segment of the namespace, also unknown ones."""
        self.seal()
        for segment in list(self.sealed.values()):
            self.drop(segment)
        return self._directory.delete_files()

    def close(self) -> None:
        """Serve nothing any more, and close each file when its last user has gone."""
        self.seal()
        for segment in self.sealed.values():
            segment.dropped = True
            self.close_unused(segment)
        self.sealed.clear()
        self.dirty.clear()
        self.index.clear()

    def close_unused(self, segment: Segment) -> None:
        """Close the file of a dropped segment that nobody uses any more."""
        if segment.dropped and segment.users == 0:
            segment.close()

    def _place(self, segment: Segment, entry: Entry) -> None:
        older = self.index.get(entry.key)
        if older is not None and older[0] is not segment:
            # Or it would come back when the newer one is removed and the store is opened again.
            self._append(older[0], Entry(entry.key, 0, 0))
        self.index[entry.key] = (segment, entry)
        segment.keys.add(entry.key)

    def _append(self, segment: Segment, entry: Entry) -> None:
        segment.pending.append(entry)
        self.dirty.add(segment)

    def _has_room(self) -> bool:
        """Whether a new segment may be made; not asked again for a while if not."""
        if time.monotonic() < self._full_until:
            return False
        if self._make_room(self._segment_bytes):
            return True
        self._full_until = time.monotonic() + FULL_SECONDS
        warning_once(
            f"{self._directory.path.parent} has no room for a segment of {self._segment_bytes} "
            "bytes: other namespaces are open there. No page is stored until they make room."
        )
        return False

    def _make_room(self, needed: int) -> bool:
        """Claim ``needed`` bytes more; False if they can't be had.

        What leaves for it: first what is too much of our own, segments that were not read for the
        longest time; then other models' pages, which nobody has open.
        """
        with self._directory.root_locked() as alone:
            if not alone:
                return False
            others = self._directory.neighbours()
            wish = self._most_bytes() + needed
            limit = others.limit(self._max_bytes)
            self._evict(limit - needed)
            left = self._delete_closed(others, needed)
            # What nobody lets us delete is in our way as well.
            self._evict(others.unclaimed(self._max_bytes) - left - needed)
            own = self._most_bytes()
            granted = own + needed <= min(limit, others.unclaimed(self._max_bytes) - left)
            claim = own + needed if granted else own
            self._directory.claim(Held(claim, max(claim, wish)))
        return granted

    def _most_bytes(self) -> int:
        """Bytes that this namespace comes to when the active segment is full."""
        numbers = set(self.sealed)
        most = sum(segment.most_bytes for segment in self.sealed.values())
        if self.active is not None:
            numbers.add(self.active.number)
            most += max(self._segment_bytes, self.active.most_bytes)
        return most + self._directory.bytes_besides(numbers)

    def _evict(self, limit: int) -> None:
        """Delete our segments until they come to ``limit`` bytes at most."""
        while self._most_bytes() > limit and self.segments:
            if not self.sealed:
                self.seal()
                continue
            victim = min(self.sealed.values(), key=lambda segment: segment.tick)
            self._counters.add("evicted_segments")
            self.drop(victim)

    def _delete_closed(self, others: Neighbours, needed: int) -> int:
        """Delete what is too much of namespaces that nobody has open; bytes of it that are left."""
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
