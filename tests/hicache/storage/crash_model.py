"""A disk that keeps only what was synced, and every state in which a crash may leave it."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vllm_graft.hicache.storage.files import Files

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
        """All contents that a crash may leave: any of the loose writes, each whole or half."""
        ways = [[(), (write,), *halves(write)] for write in self.loose]
        for chosen in itertools.product(*ways):
            content = bytearray(self.durable)
            for write in itertools.chain.from_iterable(chosen):
                write.put(content)
            yield bytes(content)


def halves(write: Write) -> list[tuple[Write, ...]]:
    if write.data is None or len(write.data) < 2:
        return []
    middle = len(write.data) // 2
    first = Write(write.offset, write.data[:middle])
    return [(first,), (Write(write.offset + middle, write.data[middle:]),)]


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
        """Note the states in which a crash now might leave the disk."""
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
