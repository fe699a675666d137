"""Processes that map a region and end badly; spawned processes can import this file."""

import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.pages.pool_shape import PAGE, PoolShape

SHAPE = PoolShape(num_slots=3, slot_bytes=PAGE, num_shards=2)


def be_killed(pipe: Connection, name: str, folder: Path, fork: bool) -> None:
    """Map a region in ``folder``, send the process id of a child that lives on, and die."""
    region.SHM = folder
    pool = HostPool(SHAPE, name, part=SHAPE.part(0), creates=True)
    child = os.fork() if fork else None
    if child == 0:
        signal.pause()
    pipe.send(child)
    assert pool.address
    os.kill(os.getpid(), signal.SIGKILL)


def fail_after_mapping(name: str) -> None:
    """Map a region, and exit without closing it: with status 3, or 4 if it had no name."""
    pool = HostPool(SHAPE, name, creates=True)
    sys.exit(3 if pool.address and (region.SHM / name).exists() else 4)
