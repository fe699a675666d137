"""The namespaces that lie below one root, and how they share its bytes.

Each has a lock file. Who has a namespace open holds the lock, and has written into the file its
process id, how many bytes the namespace may come to (its *claim*), and how many it would like to
come to (its *wish*). All of it is read and written under the root's lock. So the claims of open
namespaces and the bytes of the others never come to more than ``max_bytes``.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.hicache.locks import lock_descriptor, locked
from vllm_graft.hicache.segments.segment import DATA_SUFFIX, segment_number
from vllm_graft.log import logger

LOCK_NAME = "LOCK"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Held:
    """A namespace that a process has open: bytes that it may come to, and would like to."""

    claim: int
    wish: int


@dataclass(frozen=True)
class Closed:
    """A namespace that no process has open.

    Attributes:
        path: its directory.
        bytes: of its segments.
        opened: when a process last opened it, in seconds since the epoch.
    """

    path: Path
    bytes: int
    opened: float


@dataclass(frozen=True)
class Neighbours:
    """All namespaces below a root but one; the closed ones longest unused first."""

    held: tuple[Held, ...]
    closed: tuple[Closed, ...]

    def limit(self, max_bytes: int) -> int:
        """Bytes that the one may come to.

        It is what the others have not claimed. But an equal part is everybody's, as far as it is
        wished for: so whoever has more gives way to those who have less.
        """
        part = max_bytes // (len(self.held) + 1)
        return max_bytes - sum(max(one.claim, min(part, one.wish)) for one in self.held)

    def unclaimed(self, max_bytes: int) -> int:
        """Bytes that no open namespace has claimed."""
        return max_bytes - sum(one.claim for one in self.held)


def neighbours(path: Path) -> Neighbours:
    """Those of the namespace at ``path``; under the root's lock."""
    held, closed = [], []
    for other in _others(path):
        size = sum(map(_size, segment_files(other)))
        try:
            with locked(other / LOCK_NAME) as free:
                if free:
                    opened = (other / LOCK_NAME).stat().st_mtime
                    closed.append(Closed(other, size, opened))
                    continue
            found = read_claim(other / LOCK_NAME)
        except OSError:
            # Another user's, perhaps: its bytes count, and are not ours to delete.
            found = Held(0, 0)
        held.append(Held(max(size, found.claim), found.wish))
    return Neighbours(tuple(held), tuple(sorted(closed, key=lambda one: one.opened)))


def claim_times(path: Path) -> dict[str, int]:
    """When the lock file of each neighbour was written to, in nanoseconds."""
    found = {}
    for other in _others(path):
        with contextlib.suppress(OSError):
            found[other.name] = (other / LOCK_NAME).stat().st_mtime_ns
    return found


def delete_closed(closed: tuple[Closed, ...], excess: int) -> int:
    """Delete ``excess`` bytes of closed namespaces, oldest segments of the longest unused first.

    Returns:
        Bytes that it has deleted, up to a segment more; less where files can't be deleted.
    """
    deleted = 0
    for one in closed:
        if deleted >= excess:
            break
        with contextlib.suppress(OSError), locked(one.path / LOCK_NAME) as free:
            if free:
                logger.info("Deleting KV of namespace %s to make room.", one.path.name)
                deleted += _delete_oldest(one.path, excess - deleted)
    return deleted


def segment_files(path: Path) -> list[Path]:
    """Files of segments in a namespace's directory, known or not; oldest first, data first."""
    try:
        files = list(path.iterdir())
    except OSError:
        return []
    # Data before its index: see Segment.unlink.
    return sorted(file for file in files if segment_number(file) is not None)


def delete_files(files: list[Path]) -> bool:
    """Delete files; False if one remains."""
    try:
        for file in files:
            file.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def bytes_of(files: list[Path]) -> int:
    """Bytes of files, of which some may go meanwhile."""
    return sum(map(_size, files))


def holders(root: Path) -> dict[bytes, int]:
    """Namespaces below a root that a process has open, and its id. Leaves nothing behind."""
    found = {}
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if _NAMESPACE.fullmatch(path.name) and (pid := _holder(path)) is not None:
                found[bytes.fromhex(path.name)] = pid
    return found


def read_claim(path: Path) -> Held:
    """What a lock file says; nothing for an earlier version's, which says less."""
    try:
        _, claim, wish = map(int, path.read_text().split())
    except ValueError:
        return Held(0, 0)
    return Held(claim, wish)


def write_claim(fd: int, held: Held) -> None:
    """Write it, and the process's id, into a lock file that is open.

    Raises:
        OSError: if the medium refuses.
    """
    # Of one length, so that a disk that is full takes it where it took the first.
    os.pwrite(fd, f"{os.getpid():020} {held.claim:020} {held.wish:020}\n".encode(), 0)


def _holder(path: Path) -> int | None:
    """The process that holds a directory's lock; None if none does, or if it can't be told."""
    try:
        fd = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # Shared: others that look do not hide it, and who wants to hold it tries again.
        if not lock_descriptor(fd, shared=True):
            return int(os.pread(fd, 20, 0))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return None


def _others(path: Path) -> list[Path]:
    return [
        other
        for other in path.parent.iterdir()
        if other != path and _NAMESPACE.fullmatch(other.name) and other.is_dir()
    ]


def _delete_oldest(path: Path, excess: int) -> int:
    deleted = 0
    for file in segment_files(path):
        # An index goes with its data.
        if deleted >= excess and file.suffix == DATA_SUFFIX:
            break
        size = _size(file)
        file.unlink(missing_ok=True)
        deleted += size
    return deleted


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0
