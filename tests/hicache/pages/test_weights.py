"""Other weights at the same path have another fingerprint, which a restart keeps."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support.checkpoints import change_a_tensor, keep_time, tensors, write_parts
from vllm_graft.hicache.pages import checkpoint as checkpoint_module
from vllm_graft.hicache.pages.checkpoint import checkpoint_fingerprint


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the times of change tell nothing, so that only the bytes do."""
    monkeypatch.setattr(checkpoint_module, "_times", lambda status: str(status.st_mtime_ns))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_parts(tmp_path)


def rename_a_tensor(path: Path) -> None:
    content = {f"0.{name}": one for name, one in tensors(0).items()}
    content["0.layer.x"] = content.pop("0.layer.7")
    save_file(content, path / "model-0.safetensors")


def change_a_type(path: Path) -> None:
    content = {f"0.{name}": one.half() for name, one in tensors(0).items()}
    save_file(content, path / "model-0.safetensors")


def drop_a_file(path: Path) -> None:
    (path / "model-1.safetensors").unlink()


def change_the_configuration(path: Path) -> None:
    (path / "config.json").write_text('{"rope_theta": 20000}')


@pytest.mark.parametrize(
    "change",
    [change_a_tensor, rename_a_tensor, change_a_type, drop_a_file, change_the_configuration],
)
@pytest.mark.usefixtures("unchanged")
def test_other_weights_at_the_same_path(checkpoint: Path, change: Callable[[Path], None]) -> None:
    before = checkpoint_fingerprint(checkpoint)
    assert checkpoint_fingerprint(checkpoint) == before
    change(checkpoint)
    for file in checkpoint.glob("*.safetensors"):
        keep_time(file)
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A tensor of 64 MiB in a sparse file, of which most rows are not sampled."""
    header = b'{"embed":{"dtype":"F32","shape":[65536,256],"data_offsets":[0,67108864]}}'
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (64 << 20))
    keep_time(tmp_path / "model.safetensors")
    return tmp_path


def mend(path: Path, first: int, rows: int) -> None:
    """Write rows of the tensor in place, and keep the time of modification."""
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size - (64 << 20) + first * 1024)
        stream.write(b"\1" * (rows * 1024))
    keep_time(file)


def test_rows_mended_in_place_show_in_the_time_of_change(sparse: Path) -> None:
    seen = {checkpoint_fingerprint(sparse)}
    assert checkpoint_fingerprint(sparse) in seen
    for row in range(10):
        mend(sparse, 300 + row, 1)
        seen.add(checkpoint_fingerprint(sparse))
    assert len(seen) == 11


@pytest.mark.usefixtures("unchanged")
def test_a_large_tensor_is_sampled_in_many_places(sparse: Path) -> None:
    """A mended part as long as the distance of two samples is seen, wherever it lies."""
    seen, files = {checkpoint_fingerprint(sparse)}, len(os.listdir("/proc/self/fd"))
    for part in range(20):
        mend(sparse, part * 3000, 33)
        seen.add(checkpoint_fingerprint(sparse))
    assert len(seen) == 21
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.usefixtures("unchanged")
def test_a_small_checkpoint_is_read_completely(checkpoint: Path) -> None:
    before = checkpoint_fingerprint(checkpoint)
    file = checkpoint / "model-0.safetensors"
    content = bytearray(file.read_bytes())
    for position in range(len(content) - 20 * 40 * 64 * 4, len(content), 5003):
        content[position] ^= 1
        file.write_bytes(content)
        keep_time(file)
        assert checkpoint_fingerprint(checkpoint) != before
        content[position] ^= 1


@pytest.mark.parametrize("suffix", [".gguf", ".bin", ".pt", ".safetensors"])
@pytest.mark.usefixtures("unchanged")
def test_files_without_a_header_are_sampled(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    content = bytearray(random.Random(1).randbytes(3_000_000))
    seen = set()
    for position in (None, 0, 11_800, 2_990_000):
        if position is not None:
            content[position : position + 6000] = bytes(min(6000, len(content) - position))
        file.write_bytes(content)
        keep_time(file)
        # Take it as a directory and as a file (gguf is given as a file).
        seen.add(checkpoint_fingerprint(tmp_path))
        assert checkpoint_fingerprint(file) == checkpoint_fingerprint(file)
    assert len(seen) == 4


def test_blobs_of_the_hub_are_named_after_their_content(tmp_path: Path) -> None:
    """Times and bytes do not matter; another blob is another model."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    snapshot.mkdir()
    for name in ("a" * 64, "b" * 64):
        save_file(tensors(), blobs / name)
    link = snapshot / "model.safetensors"
    link.symlink_to(blobs / ("a" * 64))
    first = checkpoint_fingerprint(snapshot)
    os.utime(blobs / ("a" * 64), ns=(5, 5))
    assert checkpoint_fingerprint(snapshot) == first
    link.unlink()
    link.symlink_to(blobs / ("b" * 64))
    assert checkpoint_fingerprint(snapshot) != first


def test_a_large_checkpoint_is_read_in_few_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads are bounded, whatever the size: here 64 GiB in a sparse file."""
    for part in range(8):
        with (tmp_path / f"model-{part}.gguf").open("wb") as stream:
            stream.truncate(8 << 30)
    read = []
    original = os.pread

    def pread(fd: int, length: int, offset: int) -> bytes:
        read.append(length)
        return original(fd, length, offset)

    monkeypatch.setattr(os, "pread", pread)
    checkpoint_fingerprint(tmp_path)
    assert len(read) <= checkpoint_module.SAMPLES
    assert sum(read) <= checkpoint_module.SAMPLES * checkpoint_module.SAMPLE_BYTES


@pytest.mark.usefixtures("unchanged")
def test_many_tensors_are_thinned_and_headers_kept(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "SAMPLES", 10)
    before = checkpoint_fingerprint(checkpoint)
    rename_a_tensor(checkpoint)
    keep_time(checkpoint / "model-0.safetensors")
    assert checkpoint_fingerprint(checkpoint) != before


@pytest.mark.parametrize(("load_format", "name"), [("pt", "a.pt"), ("npcache", "a.bin")])
def test_the_files_that_the_load_format_reads(
    checkpoint: Path, load_format: str, name: str
) -> None:
    """The safetensors files beside them are not read then."""
    (checkpoint / name).write_bytes(bytes(10))
    others = checkpoint_fingerprint(checkpoint)
    first = checkpoint_fingerprint(checkpoint, load_format)
    (checkpoint / name).write_bytes(bytes(11))
    assert checkpoint_fingerprint(checkpoint) == others
    assert checkpoint_fingerprint(checkpoint, load_format) != first
