"""Records of requests on disk: rows, rights, room, and what a run takes of them."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from vllm_graft.base.errors import ConfigError
from vllm_graft.learn.records import SEGMENTS, Records
from vllm_graft.train.target_answers import tokens_of
from vllm_graft.train.texts import Text, Tokens, read_texts, require_tokens, snapshot

MOST = 2**20
SEGMENT = MOST // SEGMENTS


def rows(folder: Path) -> list[dict[str, list[int]]]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_a_row_is_what_was_said(tmp_path: Path, count: int) -> None:
    Records(tmp_path, MOST).write(range(count), [7, *range(count)])
    assert rows(tmp_path) == [
        {"prompt_token_ids": [*range(count)], "token_ids": [7, *range(count)]}
    ]
    assert [stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()] == [0o600]


def test_the_oldest_segments_of_all_processes_make_room(tmp_path: Path) -> None:
    first, second = Records(tmp_path, MOST), Records(tmp_path, MOST)
    sizes, began = dict[Path, int](), time.time() - 60
    for number in range(60):
        (first, second)[number % 2].write([9_999_999] * (first.longest // 2), [number])
        found = {file: file.stat().st_size for file in tmp_path.iterdir()}
        for file, size in found.items():
            if size != sizes.get(file):
                os.utime(file, (began + number, began + number))
        sizes, taken = found, sum(found.values())
        assert taken <= MOST
    kept = sorted(row["token_ids"][0] for row in rows(tmp_path))
    # The newest are all there, and a good part of the room is used.
    assert kept[-10:] == [*range(50, 60)]
    assert taken > 0.4 * MOST
    assert len(kept) < 60


def test_the_longest_row_fits_into_a_segment(tmp_path: Path) -> None:
    records = Records(tmp_path, MOST)
    records.write([9_999_999] * records.longest, [])
    assert SEGMENT * 0.9 < next(tmp_path.iterdir()).stat().st_size <= SEGMENT


def test_a_write_that_failed_leaves_the_next_row_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, write, calls = Records(tmp_path, MOST), os.write, []

    def full(file: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        records.write([1], [2])
    records.write([3], [4])
    found = read_texts([str(snapshot(tmp_path, tmp_path)), str(other(tmp_path))], 64)[0]
    assert Text(Tokens((3,)), Tokens((3, 4))) in found


def other(folder: Path) -> Path:
    """Another question, because a run needs two."""
    path = folder / "other.txt"
    path.write_text("something else that is long enough")
    return path


def test_a_run_keeps_the_rows_that_were_whole_when_it_began(tmp_path: Path) -> None:
    traffic, work = tmp_path / "traffic", tmp_path / "work"
    traffic.mkdir()
    work.mkdir()
    records = Records(traffic, MOST)
    records.write([1, 2], [3])
    records.write([4], [5, 6])
    (traffic / "killed.jsonl").write_text('{"prompt_token_ids": [1, 2], "tok')
    copy = snapshot(traffic, work)
    records.write([7], [8])
    assert snapshot(traffic, work) == copy
    texts, left_out = read_texts([str(copy)], 64)
    assert not left_out
    asked = {each.prompt: each.whole for each in texts}
    assert asked == {Tokens((1, 2)): Tokens((1, 2, 3)), Tokens((4,)): Tokens((4, 5, 6))}
    assert tokens_of(None, Tokens((4, 5, 6))) == [4, 5, 6]
    require_tokens(texts, 7, "M")
    with pytest.raises(ConfigError, match="token 6, and MODEL M has 6 tokens"):
        require_tokens(texts, 6, "M")


def test_a_run_may_keep_the_newest_rows_alone(tmp_path: Path) -> None:
    for number in range(4):
        Records(tmp_path, MOST).write([number], [number])
        [new] = [each for each in tmp_path.glob("*.jsonl") if each.stat().st_mtime > 1000]
        os.utime(new, (number, number))
    (work := tmp_path / "work").mkdir()
    copy = snapshot(tmp_path, work, 2 * new.stat().st_size)
    assert [json.loads(line)["token_ids"] for line in copy.read_text().splitlines()] == [[3], [2]]


def test_a_folder_without_records_is_told(tmp_path: Path) -> None:
    (tmp_path / "killed.jsonl").write_text('{"prompt')
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="has no records: serve for a while"):
            snapshot(folder, tmp_path)
