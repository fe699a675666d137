"""The files of a model that decide its K/V: weights, code and processors.

:func:`checkpoint_fingerprint` covers, for each file with weights:

* its name, size, time of modification and time of change (``ctime``), which no tool can set;
* the header of a safetensors file, which names every tensor, its dtype, shape and place;
* samples of :data:`SAMPLE_BYTES` bytes at up to :data:`SAMPLES` places of the checkpoint: at least
  one in each tensor of a safetensors file, and more in larger tensors. Other files (gguf, .bin,
  .pt) are sampled as one tensor. A checkpoint of up to 8 MiB is read completely.

Inodes are left out, as file systems such as FUSE mounts number them anew. A file that links into
the Hugging Face cache is named there after the hash of its content, so its bytes are not read. A
mere copy gets another fingerprint because of its times. That costs a cold cache, while the opposite
mistake would cost wrong tokens."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.config.connector_options import option_flag

PROCESSORS = ("*processor*.json", "tekken.json")
"""Files that say how images, video and sound are prepared."""

_COMMIT = re.compile(r"[0-9a-f]{40}")

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


def weights_of(model: Any, engine: Any) -> str:
    """The identity of a model's weights: the user's, a commit's, or a fingerprint of the files.
    Raises `ConfigError` if the weights are not on a local disk, and the user gave no identity."""
    if engine.weights:
        return str(engine.weights)
    load_format = engine.loader_of(model).load_format
    if load_format == "dummy":
        return f"dummy {model.seed}"
    try:
        # The files of a commit never change.
        if (commit := _asked_commit(model)) is not None:
            return f"{model.model} {commit}"
        return checkpoint_fingerprint(_place(model), load_format).hex()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{option_flag('weights')}: the weights of {model.model!r} can't be told "
            f"from others ({error}). Give a text that changes whenever they do, such as a revision."
        ) from error


def commit_of(model: Any) -> str | None:
    """The commit of the Hub that a model's files come from; None if it is unknown."""
    if (commit := _asked_commit(model)) is not None:
        return commit
    folder = folder_of(model)
    known = folder is not None and folder.parent.name == "snapshots"
    return folder.name if folder and known and _COMMIT.fullmatch(folder.name) else None


def folder_of(model: Any) -> Path | None:
    """The local folder with a model's files; None if there is none, as for one file."""
    try:
        place = _place(model)
    except (OSError, ValueError):
        return None
    return place if place.is_dir() else None


def file_hashes(model: Any, names: Sequence[str]) -> dict[str, str]:
    """Hashes of a model's files by name. Each of ``names`` may stand for several."""
    folder = folder_of(model)
    if folder is None:
        return {}
    found = sorted({file for name in names for file in folder.glob(name) if file.is_file()})
    return {file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in found}


def file_hash(place: str | None) -> str | None:
    """The hash of a file's content; None if there is no such file."""
    if place is None or not (file := Path(place)).is_file():
        return None
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def _asked_commit(model: Any) -> str | None:
    """The commit that a model on the Hub was asked for at; None for other models."""
    commit = getattr(model.revision, "resolved", None) or model.revision
    wanted = commit is not None and _COMMIT.fullmatch(commit) and not Path(model.model).exists()
    return commit if wanted else None


def _place(model: Any) -> Path:
    """The local file or folder of a model; an OSError or ValueError if it has none."""
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


def checkpoint_fingerprint(path: Path, load_format: str = "auto") -> bytes:
    """The fingerprint, 16 bytes, of the checkpoint at ``path``, a file or a directory. Raises
    `OSError` if there are no weights, or a file cannot be read."""
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
    """The files with weights at ``path``, sorted by name, that vLLM reads with a load format."""
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
        return [(file, 0, start)], [(file, start + begin, end - begin) for begin, end in tensors]
    return [], [(file, 0, size)]


def _safetensors_header(file: Path, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """The offset of the data, and the tensors' ranges in it; None without a valid header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            return None
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            places = [one["data_offsets"] for name, one in header.items() if name != "__metadata__"]
            tensors = sorted((int(place[0]), int(place[1])) for place in places)
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
    files: dict[Path, int] = {}
    try:
        for file in dict.fromkeys(file for file, _, _ in ranges):
            files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        with ThreadPoolExecutor(THREADS) as pool:
            yield from pool.map(lambda one: os.pread(files[one[0]], one[2], one[1]), ranges)
    finally:
        for fd in files.values():
            os.close(fd)
