"""The file in ``/dev/shm``: one process makes it, its engine's processes map it, and it goes."""

import fcntl
import multiprocessing
import os
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.hicache.host.region_cycles import run
from tests.support.host_cache import region_processes
from tests.support.host_cache.region_processes import SHAPE
from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.hicache import setup
from vllm_graft.hicache.host import pool as host_pool
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.machine_memory import unclaimed_bytes
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape

pytestmark = pytest.mark.usefixtures("tests_importable")


@pytest.fixture
def name() -> Iterator[str]:
    found = region.PREFIX + secrets.token_hex(16)
    yield found
    for path in region.SHM.glob(f"{found}*"):
        path.unlink()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder in place of ``/dev/shm``, so that no other test's engine takes our orphans."""
    monkeypatch.setattr(region, "SHM", tmp_path)
    return tmp_path


def test_processes_share_one_region(name: str) -> None:
    one = HostPool(SHAPE, name, creates=True)
    other = HostPool(SHAPE, name)
    region.remove(name)
    one.page(1, 2, 5)[:] = b"hello"
    assert bytes(other.page(1, 2, 5)) == b"hello"
    assert not bytes(other.page(0, 2, 5)).strip(b"\0")
    one.close()
    assert bytes(other.page(1, 2, 5)) == b"hello"
    other.close()
    other.close()


def test_a_second_engine_with_the_same_name_is_refused(folder: Path) -> None:
    """The first one's pages stay as they are, whatever size the second one wants."""
    name = region.PREFIX + "0" * 32
    one = HostPool(SHAPE, name, creates=True)
    one.page(1, 2, 5)[:] = b"hello"
    for shape in (SHAPE, PoolShape(1, PAGE, 1)):
        with pytest.raises(GraftError, match=f"{name} exists: another engine was started"):
            HostPool(shape, name, creates=True)
    with pytest.raises(GraftError, match=f"has {6 * PAGE} bytes instead of {PAGE}"):
        HostPool(PoolShape(1, PAGE, 1), name)
    assert bytes(one.page(1, 2, 5)) == b"hello"
    one.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link", "cannot be opened: .*symbolic links"),
        ("pipe", "is no regular file"),
        ("mode", "has mode 644 instead of 600"),
        ("size", f"has 5 bytes instead of {6 * PAGE}"),
        ("user", "belongs to user 0, and this process runs as 12345"),
        ("nothing", "has not come within 0 s"),
    ],
)
def test_what_is_not_the_region_is_not_mapped(
    kind: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "region"
    if kind == "link":
        (folder / "target").write_bytes(bytes(SHAPE.num_bytes))
        path.symlink_to(folder / "target")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    elif kind != "nothing":
        path.write_bytes(b"hello" if kind == "size" else bytes(SHAPE.num_bytes))
        path.chmod(0o644 if kind == "mode" else 0o600)
    if kind == "user":
        words = words.replace("user 0", f"user {os.geteuid()}")
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(GraftError, match=words) as caught:
        region.attach("region", SHAPE.num_bytes, seconds=0)
    assert str(path) in str(caught.value)


def test_a_region_that_is_deleted_as_an_orphan_meanwhile_is_not_mapped(folder: Path) -> None:
    """The process that created it has ended; the engine is about to end with it."""
    os.close(region.create("region", PAGE))
    deleting = os.open(folder / "region", os.O_RDONLY)
    fcntl.flock(deleting, fcntl.LOCK_EX)
    with pytest.raises(GraftError, match="was deleted"):
        region.attach("region", PAGE, seconds=0)
    os.close(deleting)


def test_a_file_without_its_size_yet_is_left_behind_by_a_killed_process_alone(folder: Path) -> None:
    name = region.PREFIX + "1" * 32
    pool = HostPool(SHAPE, name, creates=True)
    assert [path.name for path in folder.iterdir()] == [name]
    assert region.remove_orphans() == 0
    pool.close()
    (folder / (name + region.INCOMPLETE)).write_bytes(b"")
    assert region.remove_orphans() == 1


def test_what_sparse_files_may_still_take_is_left_to_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's message queues are such files; a large message would end the engine by SIGBUS."""
    size = SimpleNamespace(f_bavail=100, f_frsize=PAGE)
    monkeypatch.setattr(os, "statvfs", lambda path: size)
    queue = folder / "psm_queue"
    with queue.open("wb") as file:
        file.truncate(60 * PAGE)
        with pytest.raises(ConfigError, match=rf"has {40 * PAGE} bytes that are free and that no"):
            region.create("region", 41 * PAGE)
        assert not (folder / "region").exists()
        os.close(region.create("region", 40 * PAGE))
        region.remove("region")
        # A file claims no more than what is not present yet.
        os.posix_fallocate(file.fileno(), 0, 60 * PAGE)
    os.close(region.create("region", 100 * PAGE))
    assert unclaimed_bytes(folder) == 0


def test_a_full_shm_is_an_error_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no SIGBUS in a copy, whether it is full at once or others fill it meanwhile."""
    huge = PoolShape(num_slots=1 << 40, slot_bytes=PAGE, num_shards=1)
    with pytest.raises(
        ConfigError, match=r"bytes that are free and .*, \d+ are needed: raise its size"
    ):
        HostPool(huge, "region", creates=True)
    # A file that was cut has no memory to give either.
    monkeypatch.setattr(host_pool, "prefer_node", lambda *_: os.truncate(folder / "region", 0))
    with pytest.raises(ConfigError, match=f"no room for {SHAPE.shard_bytes} bytes any more"):
        HostPool(SHAPE, "region", node=0, part=SHAPE.part(1), creates=True)
    # All that was taken is given back: the next try in this process may ask for less.
    assert not list(folder.iterdir())
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(folder) in _target(fd)]
    monkeypatch.setattr(region, "SHM", folder / "nowhere")
    with pytest.raises(GraftError, match=r"cannot be made: .*No such file or directory"):
        HostPool(SHAPE, "region", creates=True)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_rank_has_its_shard_from_the_start(
    old_kernel: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        monkeypatch.setattr(host_pool, "_populated", lambda *_: False)
    rank = HostPool(SHAPE, name, part=SHAPE.part(1), creates=True)
    assert (region.SHM / name).stat().st_blocks * 512 == SHAPE.shard_bytes
    looks = HostPool(SHAPE, name)
    assert (region.SHM / name).stat().st_blocks * 512 == SHAPE.shard_bytes
    looks.close()
    rank.close()


def _kill_one(folder: Path, name: str, fork: bool = False) -> int:
    """Kill a process that has mapped a region; return its child, if one lives on."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, name, folder, fork)
    process = multiprocessing.get_context("spawn").Process(
        target=region_processes.be_killed, args=arguments
    )
    process.start()
    assert ours.poll(60)
    child: int = ours.recv()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return child


def test_the_next_engine_deletes_what_a_killed_one_has_left(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead, alive, started, other = (region.PREFIX + digit * 32 for digit in "0123")
    _kill_one(folder, dead)
    assert (folder / dead).exists()
    first = HostPool(SHAPE, alive, creates=True)
    assert first.orphans == 1
    # Nobody holds these files, but they are not ours to delete.
    old, link, pipe = folder / "vllm_graft_hicache_dup", folder / other, folder / "vllm_graft_x"
    old.write_bytes(b"1")
    link.symlink_to(old)
    os.mkfifo(pipe)
    with caplog.at_level("INFO", logger="vllm.graft"):
        second = HostPool(SHAPE, started, creates=True)
    assert second.orphans == 0
    assert "killed" not in caplog.text
    assert sorted(folder.iterdir()) == sorted([folder / alive, folder / started, old, link, pipe])
    first.close()
    second.close()


def test_a_child_that_outlives_its_engine_keeps_the_region(folder: Path) -> None:
    """The child has the descriptor, so it may use the memory."""
    name = region.PREFIX + "0" * 32
    child = _kill_one(folder, name, fork=True)
    assert region.remove_orphans() == 0
    os.kill(child, signal.SIGKILL)
    # It is not our child, so we cannot wait for it; the test's timeout ends this loop.
    while not region.remove_orphans():
        time.sleep(0.01)
    assert not list(folder.iterdir())


def test_a_mapping_that_is_still_in_use_keeps_the_lock(folder: Path) -> None:
    """Storage may hold a page after `close`, so the memory stays."""
    name = region.PREFIX + "0" * 32
    pool = HostPool(SHAPE, name, creates=True)
    other = os.open(folder / name, os.O_RDONLY)
    page = pool.page(0, 0, 5)
    pool.close()
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    page.release()
    del pool
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_start_that_fails_leaves_no_file(name: str) -> None:
    """This holds if the scheduler's side cannot be made, and if a rank ends before that."""
    rank = HostPool(SHAPE, name, creates=True)
    assert (region.SHM / name).exists()
    geometry = SimpleNamespace(shared_name=name, sharing=None)
    with pytest.raises(AttributeError, match="shape"):
        setup.make_scheduler(None, geometry, None, None)  # type: ignore[arg-type]
    assert not (region.SHM / name).exists()
    rank.close()

    context = multiprocessing.get_context("spawn")
    child = context.Process(target=region_processes.fail_after_mapping, args=(name,))
    child.start()
    child.join(60)
    assert child.exitcode == 3
    assert not (region.SHM / name).exists()


def test_engines_that_start_stop_and_are_killed_leave_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = run(cycles=6, kills=8, seed=3)
    assert (counts["cycles"], counts["kills"]) == (7, 8)
    assert (counts["left"], counts["failed"]) == (0, 0)
    assert not list(folder.iterdir())
    # Negative control: killed engines leave files, unless the next engine looks for them.
    monkeypatch.setattr(region, "remove_orphans", lambda: 0)
    counts = run(cycles=0, kills=8, seed=3)
    assert counts["left"] == counts["orphans"] == len(list(folder.iterdir())) > 0
