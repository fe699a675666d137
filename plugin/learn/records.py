"""Files of recorded requests: rows of JSON, in segments of which the oldest make room."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

SEGMENTS = 16
"""Parts of the room that a segment takes. Raised, less is lost when the oldest segment goes."""

PATTERN = "*.jsonl"

_CHUNK = 1024
"""Tokens that become text at a time, about 100 us in which no other thread of the process runs."""

_TOKEN_BYTES = 9
"""Most bytes of a token in a row, for vocabularies of up to 9,999,999 tokens."""

_GROWS_SECONDS = 3600
"""A segment that was written to so lately counts as full, because its process may fill it."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class Records:
    """Writes rows of one process. A killed process leaves at most a last line that is not whole.

    Args:
        folder: of the segments of all processes.
        most: bytes that all segments may take.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._name, self._number = f"{os.getpid()}-{uuid.uuid4().hex[:8]}", 0
        self._file, self._left = -1, 0

    @property
    def longest(self) -> int:
        """Tokens of a row at most, so that one fits into a segment."""
        return self._most // SEGMENTS // _TOKEN_BYTES - 64

    def write(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add a row.

        Raises:
            OSError: as writing does; the next row begins a segment.
        """
        try:
            if self._left < _TOKEN_BYTES * (len(prompt) + len(answer) + 64):
                self._begin()
            for text in _row(prompt, answer):
                # Each call lets the engine's thread run.
                self._left -= os.write(self._file, text.encode())
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the segment; a row after that begins another."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._left = -1, 0

    def _begin(self) -> None:
        self.close()
        self._make_room()
        path = self._folder / f"{self._name}-{self._number:06d}.jsonl"
        self._number += 1
        self._file = os.open(path, _FLAGS, 0o600)
        self._left = self._most // SEGMENTS

    def _make_room(self) -> None:
        """Remove the oldest segments of all processes until a new one fits."""
        segment, lately = self._most // SEGMENTS, time.time() - _GROWS_SECONDS
        found = []
        for path in self._folder.glob(PATTERN):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # Another process made room.
            size = max(status.st_size, segment) if status.st_mtime > lately else status.st_size
            found.append((status.st_mtime_ns, size, path))
        taken = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if taken <= self._most - segment:
                break
            path.unlink(missing_ok=True)
            taken -= size


def _row(prompt: Sequence[int], answer: Sequence[int]) -> Iterator[str]:
    yield '{"prompt_token_ids": ['
    yield from _numbers(prompt)
    yield '], "token_ids": ['
    yield from _numbers(answer)
    yield "]}\n"


def _numbers(tokens: Sequence[int]) -> Iterator[str]:
    for start in range(0, len(tokens), _CHUNK):
        yield (", " if start else "") + ", ".join(map(str, tokens[start : start + _CHUNK]))
