"""The namespaces below one root, and how they share its bytes.

A process that has a namespace open holds the lock of its lock file, and has written three numbers
into it: its process id, the most bytes that the namespace may take (its *claim*), and the bytes
that it would like to take (its *wish*). All processes read and write these files under the root's
lock. So the claims of open namespaces and the bytes of closed ones together never exceed
``max_bytes``."""

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from vllm_graft.base.locks import foreign, lock_descriptor, locked, open_own
from vllm_graft.base.log import logger
from vllm_graft.hicache.storage.segments.segment import DATA_SUFFIX, segment_number

LOCK_NAME = "LOCK"
CLAIM_BYTES = 63
"""Length of the text in a lock file."""
_NAMESPACE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Held:
    """A namespace that a process has open, with its claim and its wish in bytes."""

    claim: int
    wish: int


@dataclass(frozen=True)
class Closed:
    """A namespace that no process has open; ``opened`` is when one last had, since the epoch."""

    path: Path
    bytes: int
    opened: float


@dataclass(frozen=True)
class Neighbours:
    """The namespaces below a root, except one; of the closed ones the longest unused is first."""

    held: tuple[Held, ...]
    closed: tuple[Closed, ...]

    def limit(self, max_bytes: int) -> int:
        """Most bytes that the excepted namespace may take: those that the others have not claimed.
        But each open one may have an equal part if it wishes, so that others give up bytes."""
        part = max_bytes // (len(self.held) + 1)
        return max_bytes - sum(max(one.claim, min(part, one.wish)) for one in self.held)

    def unclaimed(self, max_bytes: int) -> int:
        """Bytes that no open namespace has claimed."""
        return max_bytes - sum(one.claim for one in self.held)


def neighbours(path: Path) -> Neighbours:
    """The neighbours of the namespace at ``path``. Call it under the root's lock."""
    held, closed = [], []
    for other in _others(path):
        size = bytes_of(segment_files(other))
        try:
            if problem := foreign(other.lstat()):
                raise PermissionError(problem)
            with locked(other / LOCK_NAME) as free:
                if free:
                    opened = (other / LOCK_NAME).lstat().st_mtime
                    closed.append(Closed(other, size, opened))
                    continue
            found = read_claim(other / LOCK_NAME)
        except OSError:
            # It belongs to another user, say. Its bytes count, but we must not delete them.
            found = Held(0, 0)
        held.append(Held(max(size, found.claim), found.wish))
    return Neighbours(tuple(held), tuple(sorted(closed, key=lambda one: one.opened)))


def claim_times(path: Path) -> dict[str, int]:
    """The time at which each neighbour's lock file was last written, in nanoseconds."""
    found = {}
    for other in _others(path):
        with contextlib.suppress(OSError):
            found[other.name] = (other / LOCK_NAME).lstat().st_mtime_ns
    return found


def delete_closed(closed: tuple[Closed, ...], excess: int) -> int:
    """Delete ``excess`` bytes of closed namespaces, oldest segments first; return how many."""
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
    """The segment files in a namespace's directory, the oldest first."""
    try:
        files = list(path.iterdir())
    except OSError:
        return []
    # A data file sorts before its index file; unlink_segment says why that order matters.
    return sorted(file for file in files if segment_number(file) is not None)


def bytes_of(files: list[Path]) -> int:
    """Total bytes of files. Some may vanish meanwhile."""
    return sum(map(_size, files))


def holders(root: Path) -> dict[bytes, int]:
    """The open namespaces below a root, with the id of the process. It leaves nothing behind."""
    found = {}
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            if _NAMESPACE.fullmatch(path.name) and (pid := _holder(path)) is not None:
                found[bytes.fromhex(path.name)] = pid
    return found


def read_claim(path: Path) -> Held:
    """The claim and wish in a lock file; zeros if an earlier version wrote the file."""
    fd = open_own(path, os.O_RDONLY)
    try:
        _, claim, wish = map(int, os.pread(fd, CLAIM_BYTES, 0).split())
    except ValueError:
        return Held(0, 0)
    finally:
        os.close(fd)
    return Held(max(0, claim), max(0, wish))


def write_claim(fd: int, held: Held) -> None:
    """Write the process's id, claim and wish into an open lock file."""
    # The text always has the same length, so that a full disk accepts an overwritten one.
    text = f"{os.getpid():020} {held.claim:020} {held.wish:020}\n"
    os.pwrite(fd, text.encode(), 0)


def _holder(path: Path) -> int | None:
    """The id of the process that holds a directory's lock; None if there is none, or unknown."""
    try:
        fd = open_own(path / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return None
    try:
        # With a shared lock, processes that only look do not disturb each other. A process that
        # wants to hold the lock tries again.
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
        if other != path and _NAMESPACE.fullmatch(other.name) and _is_folder(other)
    ]


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _delete_oldest(path: Path, excess: int) -> int:
    deleted = 0
    for file in segment_files(path):
        # An index file is deleted together with its data file.
        if deleted >= excess and file.suffix == DATA_SUFFIX:
            break
        size = _size(file)
        file.unlink(missing_ok=True)
        deleted += size
    return deleted


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0
