"""A fingerprint of a checkpoint on disk, taken in well under a second.

The fingerprint covers, for each file:

* its name, size, time of modification and time of change (``ctime``);
* the header of a safetensors file, which names every tensor, its dtype, shape and place;
* samples of :data:`SAMPLE_BYTES` bytes at up to :data:`SAMPLES` places of the checkpoint: at least
  one in each tensor of a safetensors file, and more in larger tensors. Other files (gguf, .bin,
  .pt) are sampled as one tensor. A checkpoint of up to 8 MiB is read completely.

No tool can set the time of change, so it tells rows that were mended in place although the time of
modification was kept. The number of the inode adds nothing to it, as a file that takes another's
place has a new time of change. File systems such as FUSE mounts number inodes anew whenever they
are mounted, so that a restart would find a cold cache.

A file that links into the Hugging Face cache is named there after the hash of its content. That
name is enough, so its bytes are not read.

Weights that were replaced at the same path, trained further, merged or quantised again get another
fingerprint. Because of the times, so does a mere copy of a checkpoint, or one whose owner was set
again. That costs a cold cache, while the opposite mistake would cost wrong tokens. Users who want
copies to share pages set the option ``weights``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

SAMPLES = 4096
"""Most places of a checkpoint that are read."""

SAMPLE_BYTES = 2048
"""Bytes read at each place."""

THREADS = 16
"""Concurrent reads. A network mount takes about a millisecond for each."""

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
"""Suffixes of files that hold weights."""

FORMATS = {"pt": ".pt", "npcache": ".bin"}
"""Suffixes of the files that some ``--load-format`` read although there are safetensors files."""

CONFIGS = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json")
"""Files that say how to interpret the weights. They are read completely."""

_HEADER_LIMIT = 1 << 28
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Range = tuple[Path, int, int]
"""A file, an offset in it, and a number of bytes."""


def checkpoint_fingerprint(path: Path, load_format: str = "auto") -> bytes:
    """The fingerprint, 16 bytes, of the checkpoint at ``path``, a file or a directory.

    Args:
        path: the checkpoint.
        load_format: vLLM's, which says which files are read.

    Raises:
        FileNotFoundError: if there are no weights.
        OSError: if a file cannot be read.
    """
    files = weight_files(path, load_format)
    if not files:
        raise FileNotFoundError(f"no weights ({', '.join(SUFFIXES)}) at {str(path)!r}")
    digest = xxhash.xxh3_128()
    headers: list[Range] = []
    tensors: list[Range] = []
    for file in files:
        digest.update(f"{file.name}\0".encode())
        blob = file.resolve().name
        if file.is_symlink() and _BLOB.fullmatch(blob):
            digest.update(blob.encode())
            continue
        status = file.stat()
        digest.update(f"{status.st_size} {_times(status)}\0".encode())
        header, content = _content(file, status.st_size)
        headers += header
        tensors += content
    for config in CONFIGS:
        if path.is_dir() and (path / config).is_file():
            digest.update((path / config).read_bytes())
    for sample in _read_all([*headers, *_samples(tensors)]):
        digest.update(sample)
    return digest.digest()


def _times(status: os.stat_result) -> str:
    return f"{status.st_mtime_ns} {status.st_ctime_ns}"


def weight_files(path: Path, load_format: str = "auto") -> list[Path]:
    """The files with weights at ``path``, sorted by name: safetensors files if there are any.

    A load format that reads other files gets those.
    """
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES and file.is_file())
    for suffix in (FORMATS.get(load_format), ".safetensors"):
        if preferred := [file for file in found if file.suffix == suffix]:
            return preferred
    return found


def _content(file: Path, size: int) -> tuple[list[Range], list[Range]]:
    """The header of a file, which is read completely, and its tensors, which are sampled."""
    if file.suffix == ".safetensors" and (header := _safetensors_header(file, size)) is not None:
        start, tensors = header
        places = sorted(tensors.values())
        return [(file, 0, start)], [(file, start + begin, end - begin) for begin, end in places]
    return [], [(file, 0, size)]


def _safetensors_header(file: Path, size: int) -> tuple[int, dict[str, tuple[int, int]]] | None:
    """The offset of the data, and each tensor's range in it; None without a valid header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            return None
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            tensors = {
                name: (int(value["data_offsets"][0]), int(value["data_offsets"][1]))
                for name, value in header.items()
                if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return None
    return 8 + length, tensors


def _samples(tensors: list[Range]) -> list[Range]:
    """At most :data:`SAMPLES` ranges of the tensors, in proportion to the tensors' sizes."""
    tensors = [one for one in tensors if one[2]]
    step = max(1, -(-len(tensors) // SAMPLES))
    tensors = tensors[::step]
    spare = SAMPLES - len(tensors)
    total = sum(size for _, _, size in tensors)
    found: list[Range] = []
    for number, (file, start, size) in enumerate(tensors):
        count = min(1 + spare * size // total, -(-size // SAMPLE_BYTES))
        for part in range(count):
            begin, end = size * part // count, size * (part + 1) // count
            # The place varies, as otherwise all samples might be of a tensor's first rows.
            room = max(0, end - begin - SAMPLE_BYTES)
            shift = xxhash.xxh3_64_intdigest(f"{number} {part}".encode()) % (room + 1)
            found.append((file, start + begin + shift, min(SAMPLE_BYTES, end - begin)))
    return found


def _read_all(ranges: list[Range]) -> Iterator[bytes]:
    """Yield the bytes of each range, in order."""
    files: dict[Path, int] = {}
    try:
        for file in dict.fromkeys(file for file, _, _ in ranges):
            files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(lambda one: os.pread(files[one[0]], one[2], one[1]), ranges)
    finally:
        for fd in files.values():
            os.close(fd)
