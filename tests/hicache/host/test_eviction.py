"""Eviction policies: the contract, a plain reference of `lru`, and a workload that `arc` suits."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.hicache.host.eviction import ArcPolicy, EvictionPolicy, Key, LruPolicy
from vllm_graft.hooks.manager import Manager
from vllm_graft.testing import EvictionPolicyContract

POLICIES = {"lru": LruPolicy, "arc": ArcPolicy}


def nobody(key: Key) -> bool:
    return False


class TestOurs(EvictionPolicyContract):
    @pytest.fixture(params=list(POLICIES))
    def policy(self, request: pytest.FixtureRequest) -> EvictionPolicy:
        return POLICIES[request.param](capacity=8)


def test_all_are_offered_by_name() -> None:
    offers = Manager().offers("graft_eviction_policies")
    assert {offer.entry.name: offer.entry.resolve() for offer in offers} == POLICIES


def test_a_pool_holds_a_page_or_more() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        LruPolicy(0)


class Reference:
    """A reference for `lru`: a list of keys, the least recently used first."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    def insert(self, key: Key, cost: float, size: int) -> None:
        self.remove(key)
        self.keys.append(key)

    def touch(self, key: Key) -> None:
        if key in self.keys:
            self.insert(key, 0, 0)

    refresh = touch

    def remove(self, key: Key) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def evict(self, n: int, is_protected: Callable[[Key], bool]) -> list[Key] | None:
        victims = [key for key in self.keys if not is_protected(key)][:n]
        if len(victims) < n:
            return None
        for key in victims:
            self.keys.remove(key)
        return victims


names = st.integers(0, 11)
steps = st.one_of(
    st.tuples(st.just("insert"), names, st.integers(0, 5), st.sampled_from([1, 3, 1000])),
    st.tuples(st.sampled_from(["touch", "refresh", "remove"]), names),
    st.tuples(st.just("evict"), st.integers(0, 5), st.frozensets(names, max_size=4)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60))
def test_lru_has_the_same_victims_as_the_reference(sequence: list[tuple[object, ...]]) -> None:
    policy, reference = LruPolicy(8), Reference()
    for action, *arguments in sequence:
        if action == "evict":
            n, protected = arguments
            assert isinstance(protected, frozenset)
            found = policy.evict(n, protected.__contains__)  # type: ignore[arg-type]
            assert found == reference.evict(n, protected.__contains__)  # type: ignore[arg-type]
        else:
            getattr(policy, str(action))(*arguments)
            getattr(reference, str(action))(*arguments)
        assert len(policy) == len(reference.keys)


def hit_rate(policy: EvictionPolicy, trace: list[int]) -> float:
    """Return the share of hits, in a pool of ``policy.capacity`` pages."""
    hits = 0
    for key in trace:
        if key in policy:
            hits += 1
            policy.touch(key)
        else:
            if len(policy) == policy.capacity:
                assert policy.evict(1, nobody) is not None
            policy.insert(key, 1.0, 1000)
    return hits / len(trace)


def scans_and_a_hot_set(seed: int) -> list[int]:
    """Draw accesses: half go to 40 pages, the others to pages that never come again."""
    rng = random.Random(seed)
    return [rng.randrange(40) if rng.random() < 0.5 else 1000 + number for number in range(8000)]


def test_arc_resists_a_scan() -> None:
    trace = scans_and_a_hot_set(1)
    rates = {name: hit_rate(POLICIES[name](60), trace) for name in POLICIES}
    assert rates["arc"] > rates["lru"] + 0.05


def test_ageing_lets_yesterdays_favourites_go() -> None:
    """The hot set moves: pages that were used a thousand times before must not stay for ever."""
    trace = [number % 50 for number in range(20_000)] + [
        100 + number % 50 for number in range(20_000)
    ]
    for name in POLICIES:
        policy = POLICIES[name](60)
        hit_rate(policy, trace)
        assert all(100 + key in policy for key in range(50)), name


def test_arc_learns_which_part_was_too_small() -> None:
    policy = ArcPolicy(4)
    for key in range(4):
        policy.insert(key, 1, 1)
    assert policy.evict(2, nobody) == [0, 1]
    assert policy.target == 0
    policy.insert(0, 1, 1)
    assert policy.target == 1
    # The page came back, so it counts as used before, and leaves after pages used once.
    assert policy.evict(2, nobody) == [2, 3]
    policy.insert("new", 1, 1)
    assert policy.evict(1, nobody) == ["new"]
    policy.clear()
    assert policy.target == 0


def test_a_refreshed_tail_leaves_before_its_head() -> None:
    """Pages are stored head first, and refreshed tail first when the request ends."""
    for name, kind in POLICIES.items():
        policy = kind(8)
        for block in range(5):
            policy.insert(block, 1.0, 1)
        for block in reversed(range(5)):
            policy.refresh(block)
        assert policy.evict(5, nobody) == [4, 3, 2, 1, 0], name
