"""Small stores, exhaustively: every crash at every call, and every order of two or three sharers.

The store's own code runs. After a crash, any of the writes that were not synced may be there,
whole, half or as zeros, or missing, in any combination; so may names that were not synced.
"""

import errno
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field

from tests.support.host_cache.storage_sharers import namespace, stored_bytes
from vllm_graft.base.options import Bytes
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.files import Files
from vllm_graft.hicache.storage.segments import directory, space
from vllm_graft.hicache.storage.segments.neighbours import read_claim
from vllm_graft.hicache.storage.segments.store import SegmentsBackend, SegmentsOptions
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of, read_page

State = dict[str, bytes]
"""The files of a directory, by name."""


@dataclass(frozen=True)
class Write:
    """A write to a file that was not synced. ``data`` is None for a cut at ``offset``."""

    offset: int
    data: bytes | None

    def put(self, content: bytearray) -> None:
        if self.data is None:
            del content[self.offset :]
            content.extend(bytes(self.offset - len(content)))
            return
        content.extend(bytes(max(0, self.offset - len(content))))
        content[self.offset : self.offset + len(self.data)] = self.data


@dataclass
class File:
    """A file's bytes that are durable, and the writes after them."""

    durable: bytes = b""
    loose: list[Write] = field(default_factory=list)
    lost: set[Write] = field(default_factory=set)
    """Writes whose sync has failed. The kernel may have dropped them: no later sync keeps them."""

    def sync(self) -> None:
        content = bytearray(self.durable)
        for write in self.loose:
            if write not in self.lost:
                write.put(content)
        self.durable = bytes(content)
        self.loose = [write for write in self.loose if write in self.lost]

    def states(self) -> Iterator[bytes]:
        """Yield what a crash may leave: any of the loose writes, each whole or torn."""
        ways = [[(), (write,), *torn(write)] for write in self.loose]
        for chosen in itertools.product(*ways):
            content = bytearray(self.durable)
            for write in itertools.chain.from_iterable(chosen):
                write.put(content)
            yield bytes(content)


def torn(write: Write) -> list[tuple[Write, ...]]:
    """The first half of a write, the second, and zeros of its length."""
    if write.data is None or len(write.data) < 2:
        return []
    middle = len(write.data) // 2
    first = Write(write.offset, write.data[:middle])
    second = Write(write.offset + middle, write.data[middle:])
    return [(first,), (second,), (Write(write.offset, bytes(len(write.data))),)]


class Disk(Files):
    """The system calls of a store in one directory.

    After each call, ``crashes`` has all states that a crash might leave, with what the store had
    promised by then.
    """

    def __init__(self, state: State, promise: Any) -> None:
        self.files = {name: File(content) for name, content in state.items()}
        self.named = set(state)
        self.renames: list[tuple[str, File | None]] = []
        """Names that were added (with their file) or removed, and not synced."""
        self.open_files: dict[int, str] = {}
        self.failing: set[str] = set()
        """Suffixes of the files whose next sync fails."""
        self.promise = promise
        self.crashes: dict[tuple[frozenset[tuple[str, bytes]], Any], None] = {}
        self.kept: dict[str, File] = dict(self.files)

    def crash(self) -> None:
        for count in itertools.product((False, True), repeat=len(self.renames)):
            names = dict(self.kept)
            for happened, (name, file) in zip(count, self.renames):
                if happened and file is not None:
                    names[name] = file
                elif happened:
                    names.pop(name, None)
            contents = [[(name, one) for one in set(file.states())] for name, file in names.items()]
            for chosen in itertools.product(*contents):
                self.crashes[frozenset(chosen), self.promise] = None

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self.open_files[fd] = path.name
        self.files[path.name] = File()
        self.renames.append((path.name, self.files[path.name]))
        self.crash()
        return fd

    def open(self, path: Path, make: bool = False) -> int:
        made = make and not path.exists()
        fd = super().open(path, make)
        self.open_files[fd] = path.name
        if made:
            self.files[path.name] = File()
            self.renames.append((path.name, self.files[path.name]))
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(map(bytes, buffers))
        self.files[self.open_files[fd]].loose.append(Write(offset, data))
        self.crash()
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        name = self.open_files[fd]
        file = self.files[name]
        if Path(name).suffix in self.failing:
            self.failing.remove(Path(name).suffix)
            file.lost |= set(file.loose)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file.sync()
        self.crash()

    def sync_directory(self, path: Path) -> None:
        for name, file in self.renames:
            if file is not None:
                self.kept[name] = file
            else:
                self.kept.pop(name, None)
        self.renames.clear()
        self.crash()

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Also see the calls that a store makes without :class:`Files`."""
        unlink, truncate = Path.unlink, os.truncate

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            there = path.exists()
            unlink(path, missing_ok)
            if there and path.name in self.files:
                del self.files[path.name]
                self.renames.append((path.name, None))
                self.crash()

        def truncated(fd: int, size: int) -> None:
            truncate(fd, size)
            self.files[self.open_files[fd]].loose.append(Write(size, None))
            self.crash()

        patch.setattr(Path, "unlink", unlinked)
        patch.setattr(os, "truncate", truncated)


LENGTH = 40
KEYS = [page_key(number) for number in range(4)]


class TinyOptions(SegmentsOptions):
    """Sizes that a user can't give."""

    max_bytes: Annotated[Bytes, Field(ge=1)]
    segment_bytes: Annotated[Bytes, Field(ge=1)] | None = None


class Tiny(SegmentsBackend):
    OPTIONS = TinyOptions


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def open_store(root: Path, files: Files) -> SegmentsBackend:
    return Tiny(NAMESPACE, {"path": root, "max_bytes": 8000, "segment_bytes": 1500}, files)


Promise = tuple[frozenset[int], frozenset[int]]
"""Pages that have to be there, and pages that must not, by number."""

Step = Callable[[SegmentsBackend, Disk], None]


def write(number: int) -> Step:
    def step(store: SegmentsBackend, disk: Disk) -> None:
        there, gone = disk.promise
        disk.promise = (there, gone - {number})
        assert store.write(KEYS[number], memoryview(page_of(KEYS[number], LENGTH)))

    return step


def flush(store: SegmentsBackend, disk: Disk) -> None:
    if store.flush():
        there = frozenset(n for n, found in enumerate(store.contains(KEYS)) if found)
        disk.promise = (there, frozenset(range(len(KEYS))) - there)
        disk.crash()


def remove(number: int) -> Step:
    def step(store: SegmentsBackend, disk: Disk) -> None:
        there, gone = disk.promise
        disk.promise = (there - {number}, gone)
        store.remove(KEYS[number])

    return step


def clear(store: SegmentsBackend, disk: Disk) -> None:
    disk.promise = (frozenset(), disk.promise[1])
    assert store.clear()
    disk.promise = (frozenset(), frozenset(range(len(KEYS))))
    disk.crash()


def fail_sync(suffix: str) -> Step:
    """Let the next sync of a file fail, and nothing stays promised meanwhile."""

    def step(store: SegmentsBackend, disk: Disk) -> None:
        there, gone = disk.promise
        disk.promise = (frozenset() if suffix == ".data" else there, gone)
        disk.failing.add(suffix)

    return step


STORIES: dict[str, list[Step]] = {
    "commit": [write(0), write(1), flush, write(2), flush],
    "remove": [write(0), write(1), flush, remove(0), flush, write(0), flush],
    "clear": [write(0), flush, write(1), clear, write(2), flush],
    "segments": [write(0), write(1), flush, write(2), flush, write(3), flush],
    "index": [write(0), flush, write(1), fail_sync(".index"), flush, write(2), flush],
    "data": [write(0), flush, write(1), fail_sync(".data"), flush, write(2), flush],
}


def crashes(root: Path, state: State, story: list[Step], promise: Promise) -> Disk:
    """Run a story on a disk, and return it with all states in which a crash may leave it."""
    put(root, state)
    disk = Disk(state, promise)
    with pytest.MonkeyPatch.context() as patch:
        disk.watch(patch)
        disk.crash()
        store = open_store(root, disk)
        for step in story:
            step(store, disk)
        # A crash, and not an end: what was not flushed is not written.
        store._space.close()
        store._directory.close()
    return disk


def put(root: Path, state: State) -> None:
    shutil.rmtree(root, ignore_errors=True)
    folder = root / NAMESPACE.hex()
    folder.mkdir(parents=True)
    for name, content in state.items():
        (folder / name).write_bytes(content)


def check(root: Path, state: State, promise: Promise) -> int:
    """Recover a state: no page is wrong or believed without its bytes, and promises are kept."""
    put(root, state)
    store = open_store(root, Files())
    hits = 0
    for number, (key, indexed) in enumerate(zip(KEYS, store.contains(KEYS))):
        status, page = read_page(store, key, LENGTH)
        assert status is (ReadStatus.HIT if indexed else ReadStatus.MISS), (number, status, state)
        assert not indexed or page == page_of(key, LENGTH)
        assert indexed or number not in promise[0], (number, "is lost", state)
        assert not indexed or number not in promise[1], (number, "came back", state)
        hits += indexed
    store._space.close()
    store._directory.close()
    return hits


def check_all(root: Path, disk: Disk) -> set[int]:
    return {check(root, dict(state), promise) for state, promise in disk.crashes}


NOTHING: Promise = (frozenset(), frozenset(range(len(KEYS))))


@pytest.mark.parametrize("story", STORIES)
def test_every_crash_at_every_call(tmp_path: Path, story: str) -> None:
    disk = crashes(tmp_path / "run", {}, STORIES[story], NOTHING)
    assert len(disk.crashes) > 100
    found = check_all(tmp_path / "crash", disk)
    assert 0 in found
    assert max(found) >= 2 or story == "clear"


def test_every_crash_within_every_recovery(tmp_path: Path) -> None:
    """A crash in mid-commit, a recovery that crashes as well, and another recovery."""
    first = crashes(tmp_path / "run", {}, [write(0), flush, write(1), flush], NOTHING)
    states = 0
    for state, promise in first.crashes:
        again = crashes(tmp_path / "again", dict(state), [], promise)
        for second, same in again.crashes:
            if second != state:
                check(tmp_path / "crash", dict(second), same)
                states += 1
    assert states > 300


def test_an_index_that_is_written_first_would_be_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the sync of the data before the index, entries are believed."""
    monkeypatch.setattr(
        "vllm_graft.hicache.storage.segments.segment.Segment._sync_data", lambda *_: None
    )
    disk = crashes(tmp_path / "run", {}, [write(0), flush], NOTHING)
    with pytest.raises(AssertionError, match="CORRUPT"):
        check_all(tmp_path / "crash", disk)


# --- sharers of one root ----------------------------------------------------------------------

SEGMENT, MAX_BYTES = 600, 2000
"""Three segments fit into a root, and one page into a segment."""


class Sharers:
    """Namespaces below one root, which are opened, filled, flushed, closed and killed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stores: dict[int, SegmentsBackend] = {}
        self.pages = itertools.count()

    def actions(self, count: int) -> Iterator[tuple[str, int]]:
        for number in range(count):
            names = ("fill", "flush", "close", "kill") if number in self.stores else ("open",)
            yield from ((name, number) for name in names)

    def act(self, name: str, number: int) -> None:
        if name == "open":
            options = {"path": self.root, "max_bytes": MAX_BYTES, "segment_bytes": SEGMENT}
            self.stores[number] = Tiny(namespace(number), options)
        elif name == "fill":
            for _ in range(4):
                self.stores[number].write(page_key(next(self.pages)), memoryview(bytes(100)))
        elif name == "flush":
            self.stores[number].flush()
        elif name == "close":
            self.stores.pop(number).close()
        else:
            killed = self.stores.pop(number)
            killed._space.close()
            killed._directory.close()

    def check(self) -> None:
        assert stored_bytes(self.root) <= MAX_BYTES
        claims = 0
        for folder in self.root.glob("?" * 32):
            used = stored_bytes(folder)
            claim = read_claim(folder / "LOCK").claim
            is_open = any(namespace(number).hex() == folder.name for number in self.stores)
            assert not is_open or used <= claim
            claims += claim if is_open else used
        assert claims <= MAX_BYTES


def run(root: Path, path: tuple[tuple[str, int], ...], count: int) -> list[tuple[str, int]]:
    """Take these actions, check the last, and return those that may come next."""
    shutil.rmtree(root, ignore_errors=True)
    sharers = Sharers(root)
    for action in path:
        sharers.act(*action)
    sharers.check()
    following = [*sharers.actions(count)]
    for number in [*sharers.stores]:
        sharers.act("kill", number)
    return following


LONG = [pytest.param(*sizes, marks=pytest.mark.nightly) for sizes in ((2, 5), (3, 4))]


@pytest.mark.parametrize(("count", "depth"), [(2, 3), *LONG])
def test_every_order_of_sharers_keeps_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, depth: int
) -> None:
    """The claims of open namespaces and the bytes of closed ones never exceed ``max_bytes``."""
    monkeypatch.setattr(space, "FULL_SECONDS", 0)
    monkeypatch.setattr(directory, "SHARE_SECONDS", 0)
    # The first may have all the room, and the second wants some.
    paths: list[tuple[tuple[str, int], ...]] = [
        (("open", 0), ("fill", 0), ("open", 1), ("fill", 1))
    ]
    checked = 0
    for _ in range(depth):
        longer: list[Any] = []
        for path in paths:
            following = run(tmp_path / "root", path, count)
            longer += [(*path, action) for action in following]
            checked += 1
        paths = longer
    for path in paths:
        run(tmp_path / "root", path, count)
    assert checked + len(paths) > 100
