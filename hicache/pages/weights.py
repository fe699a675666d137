"""A fingerprint of a checkpoint on disk, taken in well under a second.

The fingerprint covers, for each file:

* its name, size and time of modification;
* the header of a safetensors file, which names every tensor, its dtype, shape and place;
* samples of :data:`SAMPLE_BYTES` bytes at up to :data:`SAMPLES` places of the checkpoint. Files in
  safetensors format are sampled once per tensor, other files (gguf, .bin, .pt) at equal distances.

A file that links into the Hugging Face cache is named there after the hash of its content. That
name is enough, so its bytes are not read.

Weights that were replaced at the same path, trained further, merged or quantised again get another
fingerprint. Because of the time of modification, so does a mere copy of a checkpoint. That costs a
cold cache, while the opposite mistake would cost wrong tokens. Users who want copies to share pages
set the option ``weights``.
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

CONFIGS = ("config.json", "params.json", "quantize_config.json", "hf_quant_config.json")
"""Files that say how to interpret the weights. They are read completely."""

_HEADER_LIMIT = 1 << 28
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

Range = tuple[Path, int, int]


def checkpoint_fingerprint(path: Path) -> bytes:
    """The fingerprint, 16 bytes, of the checkpoint at ``path``, a file or a directory.

    Raises:
        FileNotFoundError: if there are no weights.
        OSError: if a file cannot be read.
    """
    files = weight_files(path)
    if not files:
        raise FileNotFoundError(f"no weights ({', '.join(SUFFIXES)}) at {str(path)!r}")
    digest = xxhash.xxh3_128()
    ranges: list[Range] = []
    for file in files:
        digest.update(f"{file.name}\0".encode())
        blob = file.resolve().name
        if file.is_symlink() and _BLOB.fullmatch(blob):
            digest.update(blob.encode())
            continue
        status = file.stat()
        digest.update(f"{status.st_size} {status.st_mtime_ns}\0".encode())
        ranges += _ranges(file, status.st_size)
    for config in CONFIGS:
        if path.is_dir() and (path / config).is_file():
            digest.update((path / config).read_bytes())
    for sample in _read_all(_thin(ranges)):
        digest.update(sample)
    return digest.digest()


def weight_files(path: Path) -> list[Path]:
    """The files with weights at ``path``, sorted by name: safetensors files if there are any."""
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("*") if file.suffix in SUFFIXES and file.is_file())
    preferred = [file for file in found if file.suffix == ".safetensors"]
    return preferred or found


def _ranges(file: Path, size: int) -> list[Range]:
    """The ranges of a file to read: header and a sample per tensor, or evenly spread samples."""
    if file.suffix == ".safetensors" and (header := _safetensors_header(file, size)) is not None:
        start, tensors = header
        found: list[Range] = [(file, 0, start)]
        for name, (begin, end) in sorted(tensors.items()):
            # The place depends on the name, so that not all samples are of a tensor's first rows.
            room = max(0, end - begin - SAMPLE_BYTES)
            shift = xxhash.xxh3_64_intdigest(name.encode()) % (room + 1)
            found.append((file, start + begin + shift, min(SAMPLE_BYTES, end - begin)))
        return found
    count = max(1, min(256, size // SAMPLE_BYTES))
    return [(file, size * index // count, SAMPLE_BYTES) for index in range(count)]


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


def _thin(ranges: list[Range]) -> list[Range]:
    """About :data:`SAMPLES` of the ranges, evenly spread. Headers always stay."""
    step = -(-len(ranges) // SAMPLES)
    if step <= 1:
        return ranges
    return [one for index, one in enumerate(ranges) if index % step == 0 or one[1] == 0]


def _read_all(ranges: list[Range]) -> Iterator[bytes]:
    """Yield the bytes of each range, in order."""
    files = {file: os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file, _, _ in ranges}
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(lambda one: os.pread(files[one[0]], one[2], one[1]), ranges)
    finally:
        for fd in files.values():
            os.close(fd)
