"""Heads in a folder: whole or not there, judged, and not too many."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vllm_graft.learn import publications
from vllm_graft.learn.publications import (
    FACTS,
    KEEPS,
    KEPT,
    REFUSED,
    WEIGHTS,
    Facts,
    Publications,
    digest,
    weights_of,
)

FACTS_OF = Facts("base", 0, 1.5, 1.7, 60.0)


@pytest.fixture
def head(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text("{}")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("facts", ["{}", "[", '{"base": "base", "seconds": "long"}', None])
def test_what_is_no_head_is_passed_over(
    tmp_path: Path, head: list[Path], facts: str | None
) -> None:
    shelf = Publications(tmp_path / "shelf")
    good = shelf.publish(head, FACTS_OF)
    other = good.folder.parent / "000007"
    if facts is None:
        other.touch()
    else:
        other.mkdir()
        (other / FACTS).write_text(facts)
    assert shelf.each("base") == [good]


def test_a_head_is_published_and_judged(tmp_path: Path, head: list[Path]) -> None:
    shelf = Publications(tmp_path / "shelf")
    assert shelf.each("base") == []
    first, second = (shelf.publish(head, FACTS_OF) for _ in range(2))
    shelf.publish(head, Facts("other", 0, 1.0, 2.0, 1.0))
    assert shelf.each("base") == [first, second]
    assert (first.number, second.number) == (1, 2)
    assert first.weights.read_bytes() == head[1].read_bytes()
    assert (tmp_path / "shelf" / "heads").stat().st_mode & 0o777 == 0o700
    shelf.judge(first, KEPT)
    shelf.judge(second, REFUSED)
    assert [each.verdict for each in shelf.each("base")] == [KEPT, REFUSED]
    # Numbers are not given twice, whatever became of a head.
    assert shelf.publish(head, FACTS_OF).number == 4


def test_a_verdict_is_not_that_of_a_later_head_of_the_number(
    tmp_path: Path, head: list[Path]
) -> None:
    shelf = Publications(tmp_path)
    first = shelf.publish(head, FACTS_OF)
    shutil.rmtree(first.folder)
    shelf.judge(first, REFUSED)
    second = shelf.publish(head, FACTS_OF)
    assert second.number == first.number
    shelf.judge(first, REFUSED)
    assert shelf.each("base") == [second]


def test_old_heads_go_and_the_one_that_serves_stays(tmp_path: Path, head: list[Path]) -> None:
    shelf = Publications(tmp_path)
    for number in range(1, KEEPS + 4):
        shelf.judge(shelf.publish(head, FACTS_OF), KEPT if number <= 2 else REFUSED)
    shelf.trim("another")
    assert len(shelf.each("base")) == KEEPS + 3
    shelf.trim("base")
    assert [each.number for each in shelf.each("base")] == [2, *range(4, KEEPS + 4)]


def test_what_is_not_whole_is_passed_over(tmp_path: Path, head: list[Path]) -> None:
    shelf = Publications(tmp_path)
    whole = shelf.publish(head, FACTS_OF)
    for name, text in (("000007", '{"base": "ba'), ("000008", "{}"), ("000009", None)):
        folder = tmp_path / "heads" / name
        folder.mkdir()
        if text is not None:
            (folder / FACTS).write_text(text)
    (tmp_path / "heads" / "notes").mkdir()
    assert shelf.each("base") == [whole]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, head: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Publications(tmp_path / "shelf")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(publications, "_sync", full)
    with pytest.raises(OSError, match="No space"):
        shelf.publish(head, FACTS_OF)
    assert [*(tmp_path / "shelf" / "heads").iterdir()] == []
    monkeypatch.undo()
    assert shelf.publish(head, FACTS_OF).number == 1


def test_a_trainer_that_is_killed_while_it_writes_publishes_nothing(
    tmp_path: Path, head: list[Path]
) -> None:
    """The process hangs where the disk would, with the files of half a head."""
    script = f"""
import time, shutil
from pathlib import Path
from vllm_graft.learn.publications import Facts, Publications
copy = shutil.copyfile
def slow(source, to):
    Path(to).write_bytes(Path(source).read_bytes()[:100])
    time.sleep(600)
shutil.copyfile = slow
files = [Path(each) for each in {[str(each) for each in head[::-1]]!r}]
Publications(Path({str(tmp_path)!r})).publish(files, Facts("base", 0, 1.0, 2.0, 3.0))
"""
    process = subprocess.Popen([sys.executable, "-c", script])
    end = time.monotonic() + 60
    while not [*tmp_path.glob("heads/.part-*/*")] and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert [*tmp_path.glob("heads/.part-*/*")] != []
    shelf = Publications(tmp_path)
    assert shelf.each("base") == []
    assert shelf.publish(head, FACTS_OF).number == 1
    assert os.listdir(tmp_path / "heads") == ["000001"]


def test_a_head_is_known_by_its_numbers(tmp_path: Path, head: list[Path]) -> None:
    found = weights_of(str(tmp_path / "head"))
    assert found == head[1]
    before = digest(found)
    found.rename(tmp_path / WEIGHTS)
    assert weights_of(str(tmp_path / "head")) is None
    assert digest(tmp_path / WEIGHTS) == before
    (tmp_path / WEIGHTS).write_bytes(b"others")
    assert digest(tmp_path / WEIGHTS) != before
