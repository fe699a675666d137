"""A namespace's directory: one process at a time, and the root that it shares with others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from vllm_graft.errors import ConfigError
from vllm_graft.hicache.locks import lock_patiently, locked
from vllm_graft.hicache.options import option_flag
from vllm_graft.hicache.segments.neighbours import (
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
from vllm_graft.hicache.segments.segment import segment_number

OPEN_SECONDS = 10.0
"""Longest that a store waits for others that are just sharing out the root, when it is opened."""
SHARE_SECONDS = 0.5
"""Likewise later, while pages wait to be written and read."""


class Directory:
    """``<root>/<namespace in hex>``, locked until :meth:`close` or the end of the process.

    Args:
        root: what the configuration calls ``path``; it is made if it is missing.
        namespace: 16 bytes.

    Raises:
        ConfigError: if it can't be made, written to, or is open elsewhere.
    """

    def __init__(self, root: Path, namespace: bytes) -> None:
        self.path = root / namespace.hex()
        self._seen: dict[str, int] = {}
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.root_locked(OPEN_SECONDS):
                # Patiently: others lock a namespace for a moment, to see whether it is open.
                self._lock = lock_patiently(self.path / LOCK_NAME, SHARE_SECONDS)
                if self._lock is not None:
                    os.ftruncate(self._lock, 0)
                    os.utime(self._lock)
                    with contextlib.suppress(OSError):
                        # Until it claims more, its bytes count. A full disk can be read.
                        self.claim(Held(0, 0))
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

    def root_locked(
        self, seconds: float = SHARE_SECONDS
    ) -> contextlib.AbstractContextManager[bool]:
        """Hold the lock under which claims are made; yields whether it could be had."""
        return locked(self.path.parent / LOCK_NAME, seconds)

    def neighbours(self) -> Neighbours:
        """The other namespaces below the root; under the root's lock."""
        self._seen = claim_times(self.path)
        return neighbours(self.path)

    def neighbours_changed(self) -> bool:
        """Whether one was opened or has claimed or wished for more, since :meth:`neighbours`."""
        return claim_times(self.path) != self._seen

    def claim(self, held: Held) -> None:
        """Tell the others how many bytes this namespace may come to; under the root's lock.

        Raises:
            OSError: if the file can't be written.
        """
        if self._lock is not None:
            write_claim(self._lock, held)

    def bytes_besides(self, numbers: Collection[int]) -> int:
        """Bytes of segments other than these: unreadable, foreign, or not to be deleted."""
        files = segment_files(self.path)
        return bytes_of([file for file in files if segment_number(file) not in numbers])

    def delete_files(self) -> bool:
        """Delete every segment file of this namespace, known or not; False if one remains."""
        return delete_files(segment_files(self.path))

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            fd, self._lock = self._lock, None
            os.close(fd)
