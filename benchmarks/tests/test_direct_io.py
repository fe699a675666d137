"""The measurement of O_DIRECT on a small file: what it counts, and that it checks what it reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.direct_io import ARMS, Arm, Pages, measure

PAGE = 64 << 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose file system has O_DIRECT."""
    try:
        os.close(os.open(tmp_path / "try", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"{tmp_path} has no O_DIRECT: {error}")
    return tmp_path


def test_each_arm_has_a_row_per_pass(folder: Path) -> None:
    rows = measure(folder, PAGE, threads=2, total=4 * PAGE, rounds=2)
    passes = {"write", "read, cold", "read, warm"}
    assert {(row["arm"], row["pass"]) for row in rows} == {
        (arm.name, each) for arm in ARMS for each in passes
    }
    for row in rows:
        # What O_DIRECT moves does not enter the page cache.
        assert row["cached after"] == (0 if "direct" in str(row["arm"]) else 1)
    assert not [file for file in folder.iterdir() if file.is_dir()]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_page_that_was_changed_is_noticed(folder: Path, arm: Arm) -> None:
    pages = Pages(folder / "pages", arm, PAGE, count=3, threads=2)
    try:
        pages.write()
        pages.read()
        with (folder / "pages").open("r+b") as file:
            file.seek(arm.header_bytes + PAGE // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        pages.forget()
        with pytest.raises(RuntimeError, match="page 0 was read wrongly"):
            pages.read()
    finally:
        pages.close()
