"""The directory of a namespace, which one process at a time has open.

Its parent directory, the root, is shared with other namespaces.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.locks import lock_patiently, locked
from vllm_graft.hicache.config.connector_options import option_flag
from vllm_graft.hicache.storage.folder import make_folder, warn_of_others
from vllm_graft.hicache.storage.segments.neighbours import (
    LOCK_NAME,
    Held,
    Neighbours,
    bytes_of,
    claim_times,
    delete_files,
    neighbours,
    segment_files,
    write_claim,
)
from vllm_graft.hicache.storage.segments.segment import segment_number

OPEN_SECONDS = 10.0
"""Most seconds that a store waits for the root's lock when it is opened."""
SHARE_SECONDS = 0.5
"""Most seconds that it waits for a lock later, while pages wait to be written and read."""


class Directory:
    """``<root>/<namespace in hex>``, locked until :meth:`close` or the end of the process.

    Args:
        root: the option ``path``. The directory is created if it is missing.
        namespace: 16 bytes.

    Raises:
        ConfigError: if the directory cannot be created or written to, or another process has it
            open.
    """

    def __init__(self, root: Path, namespace: bytes) -> None:
        self.path = root / namespace.hex()
        self._seen: dict[str, int] = {}
        self._lock: int | None = None
        try:
            warn_of_others(root)
            self._open(OPEN_SECONDS)
        except OSError as error:
            raise ConfigError(
                f"{option_flag('storage', 'path')}: {str(root)!r} cannot be used: {error}. Give a "
                "directory on a local disk that the engine may write to."
            ) from error
        if self._lock is None:
            raise ConfigError(
                f"{option_flag('storage', 'path')}: another process has {str(self.path)!r} open. "
                "Give each engine its own path."
            )

    def _open(self, seconds: float) -> None:
        """Make the directory if it is missing, and lock it if no other process has.

        Raises:
            OSError: if that is impossible.
        """
        make_folder(self.path)
        with self.root_locked(seconds):
            # Other processes lock a namespace for a moment, to see whether it is open. So the
            # lock is tried several times.
            self._lock = lock_patiently(self.path / LOCK_NAME, SHARE_SECONDS)
            if self._lock is not None:
                os.ftruncate(self._lock, 0)
                os.utime(self._lock)
                with contextlib.suppress(OSError):
                    # Without a claim only the existing bytes count. On a full disk the write
                    # fails, but pages can still be read.
                    self.claim(Held(0, 0))

    def removed(self) -> bool:
        """Whether somebody has removed the directory, or put another one in its place."""
        if self._lock is None:
            return True
        try:
            return not os.path.samestat(os.fstat(self._lock), (self.path / LOCK_NAME).lstat())
        except OSError:
            return True

    def renew(self) -> bool:
        """Make the directory anew and lock it; False if another process has it, or it can't be."""
        self.close()
        try:
            self._open(SHARE_SECONDS)
        except OSError:
            return False
        return self._lock is not None

    def root_locked(
        self, seconds: float = SHARE_SECONDS
    ) -> contextlib.AbstractContextManager[bool]:
        """Hold the root's lock, under which claims are made; yields whether it was acquired."""
        return locked(self.path.parent / LOCK_NAME, seconds)

    def neighbours(self) -> Neighbours:
        """The other namespaces below the root. Call it under the root's lock."""
        self._seen = claim_times(self.path)
        return neighbours(self.path)

    def neighbours_changed(self) -> bool:
        """Whether a neighbour was opened or wrote a claim since the last :meth:`neighbours`."""
        return claim_times(self.path) != self._seen

    def claim(self, held: Held) -> None:
        """Publish this namespace's claim and wish. Call it under the root's lock.

        Raises:
            OSError: if the lock file cannot be written.
        """
        if self._lock is not None:
            write_claim(self._lock, held)

    def bytes_besides(self, numbers: Collection[int]) -> int:
        """Bytes of all segments but those with these numbers.

        The others are unreadable, of a foreign format, or could not be deleted.
        """
        files = segment_files(self.path)
        return bytes_of([file for file in files if segment_number(file) not in numbers])

    def delete_files(self) -> bool:
        """Delete all segment files of this namespace, even unknown ones; False if one remains."""
        return delete_files(segment_files(self.path))

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            fd, self._lock = self._lock, None
            os.close(fd)
