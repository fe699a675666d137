"""Waits for prefetches, which a scheduler only polls."""

import time

from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation
from vllm_graft.hicache.storage.tier.prefetcher import Prefetcher


def wait_for(prefetcher: Prefetcher, operation: PrefetchOperation) -> None:
    """Poll until an operation has ended. The test's next poll returns it and others."""
    for _ in range(30_000):
        if operation.ended:
            return
        time.sleep(0.001)
        ended = prefetcher.poll()
        prefetcher._active.extend(ended)
    raise AssertionError("the prefetch has not ended")
