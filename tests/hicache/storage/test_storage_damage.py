"""Files that were changed behind a store's back: it serves the written pages, or nothing."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.host_cache.storage_sharers import hits, write_all
from vllm_graft.hicache.pages.page_key import FORMAT, PageKey
from vllm_graft.hicache.storage.backend import ReadStatus, StorageBackend
from vllm_graft.hicache.storage.segments.format import encode_header, verify
from vllm_graft.hicache.storage.segments.store import SegmentsBackend
from vllm_graft.testing.contracts.cache_contracts import (
    NAMESPACE,
    OTHER,
    page_key,
    page_of,
    read_page,
)

KEYS = [page_key(number, number % 2) for number in range(40)]
OPTIONS = {"max_bytes": "8MiB", "segment_bytes": "64KiB", "sync_bytes": 10_000}


pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def segments(path: Path, namespace: bytes = NAMESPACE) -> SegmentsBackend:
    return SegmentsBackend(namespace, {"path": path, **OPTIONS})


def reopened(store: StorageBackend, path: Path) -> SegmentsBackend:
    store.close()
    return segments(path)


def fill(store: StorageBackend) -> None:
    assert all(write_all(store, KEYS))


def count_hits(store: StorageBackend) -> int:
    return sum(hits(store, KEYS))


def data_files(path: Path) -> list[Path]:
    return sorted([*path.rglob("*.data"), *path.rglob("*.index")])


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def zero(file: Path, rng: random.Random) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def zero_part(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    end = min(len(content), start + rng.randrange(1, 5000))
    content[start:end] = bytes(end - start)
    file.write_bytes(content)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def empty(file: Path, rng: random.Random) -> None:
    os.truncate(file, 0)


def grow(file: Path, rng: random.Random) -> None:
    with file.open("ab") as stream:
        stream.write(rng.randbytes(rng.randrange(1, 5000)))


def vanish(file: Path, rng: random.Random) -> None:
    file.unlink()


def repeat_a_part(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    length = rng.randrange(1, min(4000, len(content)))
    start, to = (rng.randrange(len(content) - length + 1) for _ in range(2))
    content[to : to + length] = content[start : start + length]
    file.write_bytes(content)


DAMAGES = [flip, zero, zero_part, truncate, empty, grow, vanish, repeat_a_part]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("opened", [False, True], ids=["before-opening", "while-open"])
def test_damage_is_never_served(
    tmp_path: Path, damage: Callable[[Path, random.Random], None], opened: bool
) -> None:
    """Each round damages a file of a full store, on top of the damage of the rounds before."""
    rng = random.Random(damage.__name__)
    store = segments(tmp_path)
    fill(store)
    assert store.flush()
    for _ in range(6):
        if not opened:
            store.close()
        # There may be none: files of an open store may have vanished before.
        if damaged := data_files(tmp_path):
            damage(rng.choice(damaged), rng)
        if not opened:
            store = segments(tmp_path)
        count_hits(store)
        fill(store)
    store = reopened(store, tmp_path)
    count_hits(store)
    fill(store)
    assert store.flush()
    # In the end the store works again.
    assert count_hits(store) == len(KEYS)
    store.close()


def test_a_flipped_bit_costs_one_page(tmp_path: Path) -> None:
    """The page is forgotten, also after a restart, and can be written again."""
    store = segments(tmp_path)
    fill(store)
    assert store.flush()
    file = next(file for file in data_files(tmp_path) if file.suffix != ".index")
    content = bytearray(file.read_bytes())
    content[1000] ^= 4
    file.write_bytes(content)
    assert count_hits(store) == len(KEYS) - 1
    assert store.stats()["read_corrupt"] == 1
    [bad] = [key for key, there in zip(KEYS, store.contains(KEYS)) if not there]
    store = reopened(store, tmp_path)
    assert store.contains([bad]) == [False]
    fill(store)
    assert count_hits(store) == len(KEYS)


def test_every_single_bit_of_a_record_counts() -> None:
    key, page = KEYS[0], page_of(KEYS[0], 300)
    header = encode_header(NAMESPACE, key, memoryview(page))
    assert verify(header, memoryview(page), NAMESPACE, key)
    record = bytearray(header + page)
    for bit in range(8 * len(record)):
        record[bit // 8] ^= 1 << bit % 8
        parts = memoryview(record)
        assert not verify(record[:128], parts[128:], NAMESPACE, key)
        parts.release()
        record[bit // 8] ^= 1 << bit % 8
    assert verify(record[:128], memoryview(record)[128:], NAMESPACE, key)
    for other in (page_key(999), PageKey(key.hash, key.pool + 1), PageKey(key.hash[:-1], key.pool)):
        assert not verify(header, memoryview(page), NAMESPACE, other)
    assert not verify(header, memoryview(page), OTHER, key)


def test_a_right_record_of_another_key_is_not_served(tmp_path: Path) -> None:
    """Two records are exchanged: checksums agree, keys don't."""
    store = segments(tmp_path)
    fill(store)
    [file, *_] = data_files(tmp_path)
    content, record = file.read_bytes(), 3000 + 128
    first, second = (content[start : start + record] for start in (64, 64 + record))
    file.write_bytes(content[:64] + second + first + content[64 + 2 * record :])
    assert count_hits(store) == len(KEYS) - 2


def test_another_namespaces_files_are_not_served(tmp_path: Path) -> None:
    """The weights are new, and somebody moved the old directory to the new name."""
    store = segments(tmp_path, OTHER)
    fill(store)
    store.close()
    (tmp_path / OTHER.hex()).rename(tmp_path / NAMESPACE.hex())
    store = segments(tmp_path)
    assert count_hits(store) == 0
    fill(store)
    assert count_hits(store) == len(KEYS)


@pytest.fixture
def full(tmp_path: Path) -> Path:
    store = segments(tmp_path)
    fill(store)
    store.close()
    return tmp_path


def test_a_lost_index_is_made_again(full: Path) -> None:
    for index in full.rglob("*.index"):
        index.unlink()
    store = segments(full)
    assert store.stats()["salvaged_pages"] == len(KEYS)
    assert count_hits(store) == len(KEYS)
    # The new index lasts.
    store = reopened(store, full)
    assert store.stats()["salvaged_pages"] == 0
    assert count_hits(store) == len(KEYS)


def test_a_torn_tail_is_cut(full: Path) -> None:
    """Half of the last record was written, and its index entry was not."""
    data = sorted(full.rglob("*.data"))[-1]
    index = data.with_suffix(".index")
    os.truncate(index, index.stat().st_size - 96)
    os.truncate(data, data.stat().st_size - 1)
    store = segments(full)
    assert store.stats()["cut_bytes"] == 3000 + 128 - 1
    assert store.stats()["salvaged_pages"] == 0
    assert count_hits(store) == len(KEYS) - 1


def test_a_whole_tail_is_kept(full: Path) -> None:
    """The last two records are whole, and their index entries were not written."""
    index = sorted(full.rglob("*.index"))[-2]
    os.truncate(index, index.stat().st_size - 2 * 96 + 5)
    store = segments(full)
    assert store.stats()["salvaged_pages"] == 2
    assert count_hits(store) == len(KEYS)


def test_a_later_format_is_left_alone(full: Path) -> None:
    """It is neither read nor deleted, but a reset clears it with the rest."""
    from vllm_graft.hicache.storage.segments import format as segment_format

    path = sorted(full.rglob("*.data"))[0]
    content = path.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_format, "FORMAT", FORMAT + 1)
        header = segment_format.file_header(
            segment_format.DATA_MAGIC, int(path.stem, 16), NAMESPACE
        )
    path.write_bytes(header + content[len(header) :])
    store = segments(full)
    assert store.stats()["foreign_segments"] == 1
    lost = len(KEYS) - count_hits(store)
    assert 0 < lost < len(KEYS)
    fill(store)
    assert path.read_bytes()[: len(header)] == header
    assert store.clear()
    assert data_files(full) == []


def test_files_that_vanish_under_it_are_made_anew(tmp_path: Path) -> None:
    store = SegmentsBackend(NAMESPACE, {"path": tmp_path, "max_bytes": "8MiB"})
    for suffix in (".data", ".index"):
        fill(store)
        sorted(tmp_path.rglob(f"*{suffix}"))[-1].unlink()
        assert store.write(page_key(1000), memoryview(page_of(page_key(1000))))
        assert not store.flush()
        fill(store)
        assert store.flush()
        store.clear()
    assert store.stats()["lost_segments"] == 2
    fill(store)
    store.close()
    assert count_hits(segments(tmp_path)) == len(KEYS)


def test_keys_of_any_length(tmp_path: Path) -> None:
    store = segments(tmp_path)
    keys = [PageKey(bytes(length), 3) for length in range(1, 65)]
    for key in keys:
        assert store.write(key, memoryview(page_of(key, 100)))
    store = reopened(store, tmp_path)
    for key in keys:
        assert read_page(store, key, 100) == (ReadStatus.HIT, page_of(key, 100))


@pytest.mark.parametrize(
    "name",
    ["-1.data", "+1.data", "1_0.index", "1.data", "ffffffffffffffff.data", "0x10.data", "a.data"],
)
def test_a_file_that_is_no_segment_is_left_alone(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    stray = tmp_path / NAMESPACE.hex() / name
    stray.parent.mkdir()
    stray.write_bytes(b"mine")
    store = segments(tmp_path)
    assert f"{stray} is no file of the KV store, and is left alone" in caplog.text
    key = page_key(1)
    assert store.write(key, memoryview(page_of(key)))
    assert store.flush()
    assert store.clear()
    store.close()
    assert stray.read_bytes() == b"mine"
    assert [file.name for file in stray.parent.iterdir() if file != stray] == ["LOCK"]
