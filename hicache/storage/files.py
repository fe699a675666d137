"""The system calls of stores on disk, in one class, so that tests can let them fail."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from vllm_graft.base.locks import open_own

Buffer = memoryview | bytearray


class Files:
    """Complete reads and writes at offsets. Methods raise no errors other than OSError."""

    def preadv(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Read some bytes, and return their number; 0 at the end of the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write some bytes, and return their number."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill ``buffers`` in turn; return the bytes read, fewer if the file ends before."""
        views = [memoryview(buffer) for buffer in buffers]
        done = 0
        while views:
            count = self.preadv(fd, views, offset + done)
            if count == 0:
                break
            done += count
            views = _rest(views, count)
        return done

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> None:
        """Write all of ``buffers`` in turn."""
        views = [memoryview(buffer) for buffer in buffers]
        done = 0
        while views:
            count = self.pwritev(fd, views, offset + done)
            if count == 0:
                raise OSError(errno.ENOSPC, "the file takes no more bytes")
            done += count
            views = _rest(views, count)

    def create(self, path: Path) -> int:
        """Create a file, and open it for reading and writing. It must not exist."""
        return open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, path: Path, make: bool = False) -> int:
        """Open a file of this user for reading and writing; ``make`` it if it is missing."""
        return open_own(path, os.O_RDWR | (os.O_CREAT if make else 0))

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    while views and count >= views[0].nbytes:
        count -= views[0].nbytes
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
