"""A new request whose pages nobody has costs the step little, however long its prompt is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.pages.geometry import Geometry
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.pages.pool_shape import PoolShape
from vllm_graft.hicache.planning.request_state import RequestState
from vllm_graft.hicache.planning.storage_reads import ASKED, StorageReads

GROUP = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, 4096, ("layers.0",))
SECONDS = 0.005


class Tier:
    """Storage that has the first `there` pages of a prompt."""

    bytes_in_flight = 0

    def __init__(self, there: int) -> None:
        self.there = {number.to_bytes(32, "big") for number in range(there)}
        self.asked: list[int] = []

    def is_incoming(self, key: PageKey) -> bool:
        return False

    def contains(self, keys: Sequence[PageKey]) -> dict[PageKey, bool]:
        self.asked.append(len(keys))
        return {key: key.hash in self.there for key in keys}

    def prefetch(self, request_id: str, keys: list[PageKey], tokens: int) -> Any:
        return SimpleNamespace(keys=keys, tokens=tokens)


def arrive(blocks: int, there: int = 0) -> tuple[Tier, StorageReads, float]:
    """Let a request arrive; return the CPU seconds of this thread besides."""
    geometry = Geometry((GROUP,), PoolShape(8, 4096, 1), None, 1, 1, False, frozenset())
    tier: Any = Tier(there)
    cost: Any = SimpleNamespace(worth_reading=lambda *_: True)
    index = HostIndex(8, LruPolicy(8), {0: 4096})
    reads = StorageReads(tier, geometry, index, cost, SimpleNamespace())  # type: ignore[arg-type]
    hashes = [number.to_bytes(32, "big") for number in range(blocks)]
    request: Any = SimpleNamespace(request_id="long", block_hashes=hashes)
    began = time.thread_time()
    reads.arrived(RequestState(request, (GROUP,)), 16 * blocks)
    return tier, reads, time.thread_time() - began


@pytest.mark.parametrize("blocks", [100, 65_536])
def test_a_prompt_that_nobody_has_is_not_looked_through(blocks: int) -> None:
    tier, reads, _ = arrive(blocks)
    assert tier.asked == [min(blocks, ASKED)]
    assert not reads._running
    assert min(arrive(blocks)[2] for _ in range(5)) < SECONDS


@pytest.mark.parametrize("there", [1, ASKED, ASKED + 1, 3 * ASKED])
def test_pages_are_found_as_far_as_they_go(there: int) -> None:
    tier, reads, _ = arrive(4 * ASKED, there)
    assert tier.asked == [ASKED] * (there // ASKED + 1)
    [(operation, _, size)] = reads._running.values()
    found: Any = operation
    assert [key.hash for key in found.keys] == sorted(tier.there)
    assert (found.tokens, size) == (16 * there, 4096 * there)


def test_keys_are_those_of_full_blocks() -> None:
    """In slices as well, and of a group whose blocks have two hashes."""
    group = Group(3, 32, 2, HitPolicy.ALL_PAGES, 0, 4096, ("layers.0",))
    request: Any = SimpleNamespace(block_hashes=[bytes([number]) for number in range(5)])
    keys = RequestState(request, (group,)).keys[3]
    assert list(keys) == [PageKey(b"\x01", 3), PageKey(b"\x03", 3)] == keys[:9]
    assert keys[-1] == keys[1]
    with pytest.raises(IndexError):
        keys[2]
    request.block_hashes.append(b"\x05")
    assert keys[2] == PageKey(b"\x05", 3)
