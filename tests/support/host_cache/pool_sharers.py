"""Engines' processes that share a pool of real memory; spawned processes can import this file.

    python -m tests.support.host_cache.pool_sharers --seconds 60

Each stores and loads pages whose content follows from their keys, a rank's share of them on a
second process, and is killed or stopped at any time. The exit status is 1 if a page was wrong, a
survivor stood still for a second, or something was left in `/dev/shm`.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from vllm_graft.hicache.config.nonce import REGION_PREFIX
from vllm_graft.hicache.host import region
from vllm_graft.hicache.host.pool import HostPool
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.pages.pool_shape import PoolShape, Sharing

SHAPE = PoolShape(num_slots=64, slot_bytes=16 << 10, num_shards=1)
SPACE = b"n" * 16
KEYS = 160
LIVES, STALL = 3, 1.0
SPAWN = multiprocessing.get_context("fork")


def content(number: int) -> bytes:
    return number.to_bytes(4, "little") * (SHAPE.slot_bytes // 4)


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "big"), 0)


def number_of(page: PageKey) -> int:
    return int.from_bytes(page.hash, "big")


def rank(pipe: Connection, others: list[Connection], name: str, engine: bytes) -> None:
    """Write the pages that the scheduler says, in two pieces, and report each list."""
    for inherited in others:
        inherited.close()
    pool = HostPool(SHAPE, name, sharing=Sharing(engine, SHAPE.num_bytes))
    half = SHAPE.slot_bytes // 2
    try:
        while True:
            for number, slot in pipe.recv():
                view = pool.page(0, slot, SHAPE.slot_bytes)
                view[:half] = content(number)[:half]
                time.sleep(0)
                view[half:] = content(number)[half:]
            pipe.send(None)
    except (EOFError, OSError):  # Its scheduler was killed.
        pool.close()


def scheduler(results: Any, name: str, engine: bytes, seed: int, seconds: float) -> None:
    """Store and load pages for a while; count pages, wrong ones, and the longest time of a step."""
    ours, theirs = SPAWN.Pipe()
    worker = SPAWN.Process(target=rank, args=(theirs, [ours, results], name, engine), daemon=True)
    worker.start()
    theirs.close()
    pool = HostPool(SHAPE, name, sharing=Sharing(engine, SHAPE.num_bytes))
    index = SharedIndex(pool, SPACE, {0: SHAPE.slot_bytes})
    draw, counts, storing = random.Random(seed), Counter[str](), list[Any]()
    end, before = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        begun = time.monotonic()
        first = draw.randrange(KEYS)
        keys = [key((first + place) % KEYS) for place in range(draw.randint(1, 8))]
        index.look()
        there = [each for each in keys if index.has(each)]
        loading = index.hold(there) if index.offer(there) else None
        index.end_offers()
        counts["misses"] += loading is None
        if not storing and (pages := index.reserve(keys)):
            storing = pages
            ours.send([(number_of(page.key), page.slot) for page in pages])
        # The time that a step's thread takes is measured; what follows is the device's.
        before = max(before, time.monotonic() - begun)
        for page in loading or ():
            counts["loaded"] += 1
            counts["of others"] += page.of_other
            if bytes(pool.page(0, page.slot, SHAPE.slot_bytes)) != content(number_of(page.key)):
                counts["wrong"] += 1
        index.release(loading or ())
        if storing and ours.poll(0.001):
            ours.recv()
            counts["stored"] += len(storing)
            index.commit(storing)
            storing = []
        if draw.random() < 0.01:
            index.empty()
    results.send((dict(counts), before))
    ours.close()
    worker.join(10)
    index.close()


def run(seconds: float, seed: int, engines: int = 3) -> dict[str, float]:
    """Let engines share a pool, of which some are killed or stopped at random."""
    draw, total, stall = random.Random(seed), Counter[str](), 0.0
    name = f"{REGION_PREFIX}{draw.getrandbits(64):016x}{os.getpid():016x}"
    end, started = time.monotonic() + seconds, 0
    living: dict[int, tuple[Any, Connection]] = {}
    while time.monotonic() < end or living:
        assert time.monotonic() < end + 60, "an engine hangs"
        while len(living) < engines and time.monotonic() < end:
            started += 1
            ours, theirs = SPAWN.Pipe()
            life = min(draw.uniform(0.3, LIVES), max(0.2, end - time.monotonic()))
            given = (theirs, name, started.to_bytes(16, "big"), started, life)
            process = SPAWN.Process(target=scheduler, args=given)
            process.start()
            theirs.close()
            living[started] = process, ours
        time.sleep(draw.uniform(0.005, 0.05))
        victim = draw.choice(sorted(living))
        process, pipe = living[victim]
        action = draw.random() if time.monotonic() < end else 1.0
        with contextlib.suppress(ProcessLookupError):  # It has ended by itself.
            if action < 0.15:
                os.kill(process.pid, signal.SIGKILL)
                total["kills"] += 1
            elif action < 0.25:
                os.kill(process.pid, signal.SIGSTOP)
                time.sleep(draw.uniform(0.01, 0.2))
                os.kill(process.pid, signal.SIGCONT)
                total["stops"] += 1
        for number, (process, pipe) in list(living.items()):
            if pipe.poll():
                try:
                    counts, longest = pipe.recv()
                    total.update(counts)
                    stall = max(stall, longest)
                except EOFError:
                    total["died"] += 1
                process.join(20)
                del living[number]
    time.sleep(0.5)
    region.remove_orphans()
    total["left"] = len(list(region.SHM.glob(f"{name}*")))
    return {**total, "wrong": total["wrong"], "longest_step": round(stall, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=3)
    arguments = parser.parse_args()
    found = run(arguments.seconds, arguments.seed, arguments.engines)
    print(json.dumps(found), flush=True)
    return 1 if found["wrong"] or found["left"] or found["longest_step"] > STALL else 0


if __name__ == "__main__":
    sys.exit(main())
