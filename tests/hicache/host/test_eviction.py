"""Eviction policies: the contract, a plain reference of each, and a workload that each suits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_graft.hicache.host.eviction import EvictionPolicy, Key
from vllm_graft.hicache.host.policies.arc import ArcPolicy
from vllm_graft.hicache.host.policies.cost_aware import CostAwarePolicy
from vllm_graft.hicache.host.policies.lfu import LfuPolicy
from vllm_graft.hicache.host.policies.lru import LruPolicy
from vllm_graft.hooks.manager import Manager
from vllm_graft.testing import EvictionPolicyContract

POLICIES = {"lru": LruPolicy, "lfu": LfuPolicy, "arc": ArcPolicy, "cost_aware": CostAwarePolicy}


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
    """A reference that sorts all pages at each eviction: by worth with age, then order of use."""

    def __init__(self, worth: Callable[[int, float, int], float]) -> None:
        self.worth = worth
        self.pages: dict[Key, list[float]] = {}
        self.clock, self.age = 0, 0.0

    def _use(self, key: Key, cost: float, size: int) -> None:
        self.clock += 1
        uses = self.pages[key][2] + 1 if key in self.pages else 1
        rank = self.age + self.worth(int(uses), cost, size)
        self.pages[key] = [rank, self.clock, uses, cost, size]

    def insert(self, key: Key, cost: float, size: int) -> None:
        self._use(key, cost, size)

    def touch(self, key: Key) -> None:
        if key in self.pages:
            self._use(key, self.pages[key][3], int(self.pages[key][4]))

    def refresh(self, key: Key) -> None:
        if key in self.pages:
            self.clock += 1
            self.pages[key][1] = self.clock

    def remove(self, key: Key) -> None:
        self.pages.pop(key, None)

    def evict(self, n: int, is_protected: Callable[[Key], bool]) -> list[Key] | None:
        order = sorted(self.pages, key=lambda key: self.pages[key][:2])
        victims = [key for key in order if not is_protected(key)][:n]
        if len(victims) < n:
            return None
        for key in victims:
            self.age = max(self.age, self.pages.pop(key)[0])
        return victims


WORTH: dict[str, Callable[[int, float, int], float]] = {
    "lru": lambda uses, cost, size: 0.0,
    "lfu": lambda uses, cost, size: uses,
    "cost_aware": lambda uses, cost, size: uses * cost / size,
}

names = st.integers(0, 11)
steps = st.one_of(
    st.tuples(st.just("insert"), names, st.integers(0, 5), st.sampled_from([1, 3, 1000])),
    st.tuples(st.sampled_from(["touch", "refresh", "remove"]), names),
    st.tuples(st.just("evict"), st.integers(0, 5), st.frozensets(names, max_size=4)),
)


@pytest.mark.parametrize("name", WORTH)
@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=60))
def test_same_victims_as_the_reference(name: str, sequence: list[tuple[object, ...]]) -> None:
    policy, reference = POLICIES[name](8), Reference(WORTH[name])
    for action, *arguments in sequence:
        if action == "evict":
            n, protected = arguments
            assert isinstance(protected, frozenset)
            found = policy.evict(n, protected.__contains__)  # type: ignore[arg-type]
            assert found == reference.evict(n, protected.__contains__)  # type: ignore[arg-type]
        else:
            getattr(policy, str(action))(*arguments)
            getattr(reference, str(action))(*arguments)
        assert len(policy) == len(reference.pages)


def test_the_heap_does_not_grow_with_touches() -> None:
    policy = LfuPolicy(4)
    for key in range(4):
        policy.insert(key, 1, 1)
    for number in range(10_000):
        policy.touch(number % 4)
    assert len(policy._heap) < 100
    assert sorted(policy.evict(4, nobody) or ()) == [0, 1, 2, 3]  # type: ignore[type-var]


def hit_rate(policy: EvictionPolicy, trace: Iterable[int], cost: Callable[[int], float]) -> float:
    """Return the share of seconds saved, in a pool of ``policy.capacity`` pages of one size."""
    saved = total = 0.0
    for key in trace:
        total += cost(key)
        if key in policy:
            saved += cost(key)
            policy.touch(key)
        else:
            if len(policy) == policy.capacity:
                assert policy.evict(1, nobody) is not None
            policy.insert(key, cost(key), 1000)
    return saved / total


def scans_and_a_hot_set(seed: int) -> list[int]:
    """Draw accesses: half go to 40 pages, the others to pages that never come again."""
    rng = random.Random(seed)
    return [rng.randrange(40) if rng.random() < 0.5 else 1000 + number for number in range(8000)]


def test_arc_and_lfu_resist_a_scan() -> None:
    trace = scans_and_a_hot_set(1)
    rates = {name: hit_rate(POLICIES[name](60), trace, lambda key: 1.0) for name in POLICIES}
    assert rates["arc"] > rates["lru"] + 0.05
    assert rates["lfu"] > rates["lru"] + 0.05


def test_ageing_lets_yesterdays_favourites_go() -> None:
    """The hot set moves: pages that were used a thousand times before must not stay for ever."""
    trace = [number % 50 for number in range(20_000)] + [
        100 + number % 50 for number in range(20_000)
    ]
    for name in ("lfu", "cost_aware", "arc", "lru"):
        policy = POLICIES[name](60)
        hit_rate(policy, trace, lambda key: 1.0)
        assert all(100 + key in policy for key in range(50)), name


def test_cost_aware_saves_the_most_seconds() -> None:
    """Late pages of long prefixes cost a hundred times an early one."""
    rng = random.Random(2)
    trace = [rng.randrange(300) for _ in range(20_000)]
    rates = {
        name: hit_rate(POLICIES[name](60), trace, lambda key: 100.0 if key % 5 == 0 else 1.0)
        for name in POLICIES
    }
    assert rates["cost_aware"] > 2 * max(rates[name] for name in ("lru", "lfu", "arc"))


def test_cost_aware_counts_bytes() -> None:
    """The larger one of two pages that cost the same leaves."""
    policy = CostAwarePolicy(4)
    policy.insert("large", 1.0, 8000)
    policy.insert("small", 1.0, 1000)
    assert policy.evict(1, nobody) == ["large"]


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
