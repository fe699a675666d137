"""Locks on single bytes of an open file. The kernel frees them when the last process that has this
opening of the file ends, whatever ends it."""

import fcntl
import os
import struct

_LOCK = struct.Struct("hhqqi4x")
"""``struct flock`` of Linux: type, whence, start, length, process (0)."""


class ByteLocks:
    """Locks of one opening of a file (``F_OFD_SETLK`` of Linux). Those of another opening stand in
    the way, in this process as well. The bytes need not exist."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def take(self, byte: int, shared: bool = False) -> bool:
        """Lock a byte without waiting; False if another opening's lock stands in the way."""
        try:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte)
        except BlockingIOError:
            return False
        return True

    def free(self, byte: int) -> None:
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def elsewhere(self, byte: int) -> bool:
        """Whether another opening has locked a byte."""
        return self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte) != fcntl.F_UNLCK

    def _call(self, order: int, kind: int, byte: int) -> int:
        given = _LOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        return int(_LOCK.unpack(fcntl.fcntl(self._fd, order, given))[0])
