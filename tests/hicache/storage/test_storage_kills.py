"""Writers that get kill -9 in mid-write; ``test_storage_exhaustive`` has power failures."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.host_cache import storage_writer
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.testing.contracts.cache_contracts import page_key, page_of, read_page

KILLS = int(os.environ.get("GRAFT_KILLS", "10"))
"""The bar is 200."""
STRIDE = 100_000


def run_and_kill(path: Path, first: int, seed: int, seconds: float) -> list[int]:
    """Run and kill the writer; return the pages that it had reported as durable."""
    with storage_writer.started(path, first, seed) as writer:
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        assert writer.stdout is not None
        lines = writer.stdout.read().splitlines()
        assert writer.wait(30) == -signal.SIGKILL
    return [int(line) for line in lines]


@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_in_mid_write(tmp_path: Path) -> None:
    rng = random.Random(1)
    hits = cut = salvaged = promised = 0
    for kill in range(KILLS):
        first = kill * STRIDE
        # Every other time the writer kills itself, certainly in the middle of a write.
        durable = run_and_kill(tmp_path, first, kill * (kill % 2), rng.uniform(0.0, 0.25))
        store = storage_writer.open_store(tmp_path)
        newest = range(first, max([first, *durable]) + 30)
        for number in [*newest, *(rng.randrange(first + 1) for _ in range(20))]:
            status, page = read_page(store, page_key(number), storage_writer.PAGE_BYTES)
            if status is ReadStatus.HIT:
                hits += 1
                assert page == page_of(page_key(number), storage_writer.PAGE_BYTES)
            # No page that recovery accepted is corrupt.
            assert status in (ReadStatus.HIT, ReadStatus.MISS)
        # The last flushed page is promised, unless the writer removes it 15 pages later.
        for number in durable[-1:]:
            if (number + 15) % 11:
                promised += 1
                assert store.contains([page_key(number)]) == [True]
        stats = store.stats()
        cut += stats.get("cut_bytes", 0) > 0
        salvaged += stats.get("salvaged_pages", 0)
        store.close()
    assert hits > 0
    assert promised > 0
    print(f"{kill + 1} kills, {hits=}, {promised=}, torn tails {cut}, {salvaged=}")
