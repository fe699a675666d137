"""The region that engines share: who makes it, who is let in, and that nothing of it is left."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.host_cache import pool_sharers
from tests.support.host_cache.pool_sharers import SHAPE, SPACE, key
from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.host.shared_slots import HEAD_BYTES, USES, _arrays, control_bytes
from vllm_graft.hicache.pages.geometry import SHARED_FORMAT
from vllm_graft.hicache.pages.pool_shape import PoolShape, Sharing

BYTES = SHAPE.num_bytes
SIZE = BYTES + control_bytes(SHAPE.num_slots)
NAME = region.PREFIX + "a" * 32


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder in place of ``/dev/shm``."""
    monkeypatch.setattr(region, "SHM", tmp_path)
    return tmp_path


@pytest.fixture
def real_name() -> Iterator[str]:
    found = region.PREFIX + secrets.token_hex(16)
    yield found
    assert not list(region.SHM.glob(f"{found}*"))


def _pool(engine: int, name: str = NAME, shape: PoolShape = SHAPE, size: int = BYTES) -> HostPool:
    return HostPool(shape, name, sharing=Sharing(engine.to_bytes(16, "big"), size))


def test_another_layout_has_another_format() -> None:
    """Servers of two versions must not meet in one region: who changes it raises the format."""
    layout = [(name, np.dtype(kind).name, of) for name, kind, of in _arrays(3)]
    assert (SHARED_FORMAT, HEAD_BYTES, USES, layout) == (
        *(2, 64, 2),
        [
            ("used", "int64", (3,)),
            ("log", "int64", (3,)),
            ("engines", "uint8", (32, 16)),
            ("records", "uint8", (3, 84)),
            ("owner", "uint8", (3,)),
            ("state", "uint8", (3,)),
            ("pins", "uint8", (32, 3)),
        ],
    )


ENGINE = """
import sys, time
from vllm_graft.hicache.host import region
region.join(sys.argv[1], int(sys.argv[2]), 1)
print("here", flush=True)
time.sleep(60)
"""
FRONTEND = """
import subprocess, sys
from vllm_graft.hicache.host import region
region.remove_at_exit(sys.argv[1])
engine = subprocess.Popen([sys.executable, "-c", sys.argv[3], *sys.argv[1:3]], stdout=-1)
assert engine.stdout.readline() == b"here\\n"
engine.kill()
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_frontend_deletes_what_killed_engines_left(real_name: str, shared: bool) -> None:
    """vLLM kills the processes of a server that is stopped, unless it is told to wait."""
    fd = region.join(real_name, SIZE, 1) if shared else None
    words = [sys.executable, "-c", FRONTEND, real_name, str(SIZE), ENGINE]
    subprocess.run(words, check=True, timeout=60)
    assert (region.SHM / real_name).exists() is shared
    if fd is not None:
        region.leave(real_name, fd)
        os.close(fd)


def test_the_first_makes_it_and_the_last_deletes_it(real_name: str) -> None:
    one = _pool(1, real_name)
    rank = HostPool(SHAPE, real_name, part=SHAPE.part(0), sharing=one.sharing)
    other = _pool(2, real_name)
    path = region.SHM / real_name
    assert path.stat().st_size == SIZE
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= SIZE, "its memory is taken, the control's too"
    ones, others = (SharedIndex(pool, SPACE, {0: 1}) for pool in (one, other))
    [page] = ones.reserve([key(7)]) or ()
    rank.page(0, page.slot, 5)[:] = b"hello"
    ones.commit([page])
    ones.close()
    rank.close()
    assert path.exists()
    [found] = others.hold([key(7)]) or ()
    assert found.of_other
    assert bytes(other.page(0, found.slot, 5)) == b"hello"
    assert region.remove_orphans() == 0
    others.close()
    others.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link", "cannot be opened: .*symbolic links"),
        ("pipe", "is no regular file"),
        ("mode", "has mode 644 instead of 600"),
        ("user", "belongs to user 0, and this process runs as 12345"),
        ("second name", "has two names"),
        ("size", rf"has {SIZE + 8} bytes instead of {SIZE}"),
    ],
)
def test_what_is_not_the_region_is_not_mapped(
    kind: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted by others, or left by another version; a live lock keeps it from being deleted."""
    path = folder / NAME
    if kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        (folder / "target").write_bytes(bytes(SIZE))
        if kind == "link":
            path.symlink_to(folder / "target")
        else:
            keeps = _pool(1)
            path.chmod(0o644 if kind == "mode" else 0o600)
            if kind == "second name":
                (folder / "target").unlink()
                os.link(path, folder / "target")
            if kind == "size":
                head = path.read_bytes()[-64:]
                path.write_bytes(bytes(SIZE - 56) + head)
    if kind == "user":
        words = words.replace("user 0", f"user {os.geteuid()}")
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(GraftError, match=words) as found:
        region.join(NAME, SIZE, BYTES, seconds=0.1)
    assert (kind == "link") != ("that servers share by" in str(found.value))
    assert path.exists() or path.is_symlink()
    if kind not in ("link", "pipe"):
        keeps.close()


@pytest.mark.parametrize("linked", [False, True])
def test_what_a_killed_creator_left_keeps_nobody_out(linked: bool, folder: Path) -> None:
    """Others that wait for it then make the region, whether it has a name already or not."""
    left = folder / (NAME + region.INCOMPLETE)
    left.write_bytes(bytes(SIZE))
    if linked:
        os.link(left, folder / NAME)
    fd = region.join(NAME, SIZE, BYTES, seconds=1)
    assert [each.name for each in folder.iterdir()] == [NAME]
    assert os.fstat(fd).st_nlink == 1
    os.close(fd)


def test_another_size_is_refused_with_both(folder: Path) -> None:
    one = _pool(1)
    larger = PoolShape(SHAPE.num_slots * 2, SHAPE.slot_bytes, 1)
    with pytest.raises(
        ConfigError, match=rf"is {2 * BYTES}, but the servers .* have {BYTES}: give"
    ):
        _pool(2, shape=larger, size=2 * BYTES)
    assert list(region.pools(NAME[:-16])) == [BYTES]
    one.close()
    assert list(region.pools(NAME[:-16])) == []
    # Nobody has it any more, so its size is free to choose.
    _pool(2, shape=larger, size=2 * BYTES).close()
    assert not list(folder.iterdir())


def test_what_killed_engines_left_is_no_pool(folder: Path) -> None:
    (folder / NAME).write_bytes(bytes(SIZE))
    (folder / NAME).chmod(0o600)
    assert list(region.pools(NAME[:-16])) == []
    fresh = _pool(1)
    assert not fresh.shared.state.any()
    fresh.close()


def test_a_start_that_fails_leaves_the_others_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = _pool(1)
    monkeypatch.setattr(
        HostPool, "_populate", lambda *_: (_ for _ in ()).throw(ConfigError("full"))
    )
    with pytest.raises(ConfigError, match="full"):
        _pool(2)
    assert (folder / NAME).exists()
    one.close()
    assert not list(folder.iterdir())


def test_engines_are_killed_and_stopped_at_random() -> None:
    """Real processes: two for each engine, of which one copies."""
    found = pool_sharers.run(seconds=6, seed=secrets.randbelow(1000))
    assert found["kills"] > 5
    assert found["stops"] > 2
    assert found["of others"] > 100
    assert found["wrong"] == found["left"] == 0
    assert found["longest_step"] < pool_sharers.STALL


@pytest.mark.nightly
def test_engines_are_killed_for_long() -> None:
    found = pool_sharers.run(seconds=120, seed=secrets.randbelow(1000), engines=4)
    assert found["kills"] > 100
    assert found["wrong"] == found["left"] == 0
    assert found["longest_step"] < pool_sharers.STALL
