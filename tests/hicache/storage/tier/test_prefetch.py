"""Prefetch: which pages are loaded, how long a request waits, and that slots come back once."""

import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest

from tests.support.host_cache.dying_engines import Machine
from tests.support.host_cache.prefetches import wait_for
from tests.support.host_cache.third_stores import GoodStore
from vllm_graft.hicache.host.eviction import LruPolicy
from vllm_graft.hicache.host.index import HostIndex
from vllm_graft.hicache.messages.cache_stats import HiCacheStats
from vllm_graft.hicache.pages.groups import Group, HitPolicy
from vllm_graft.hicache.pages.page_key import PageKey
from vllm_graft.hicache.planning.cost import CostModel
from vllm_graft.hicache.planning.storage_reads import PROBE_EVERY, StorageReads
from vllm_graft.hicache.storage.backend import ReadStatus
from vllm_graft.hicache.storage.tier import prefetcher
from vllm_graft.hicache.storage.tier.prefetch_operation import PrefetchOperation
from vllm_graft.hicache.storage.tier.prefetcher import Prefetcher
from vllm_graft.testing.contracts.cache_contracts import NAMESPACE, page_key, page_of

PAGE = 64
KEYS = [page_key(number) for number in range(40)]
WAIT, BEST = math.inf, None


class Store(GoodStore):
    """Pages in memory; a read waits while ``gate`` is closed, and counts."""

    def __init__(self, keys: Sequence[PageKey]) -> None:
        super().__init__(NAMESPACE, {})
        self.pages = {key: page_of(key, PAGE) for key in keys}
        self.answers: dict[PageKey, ReadStatus | Exception] = {}
        self.reads: Counter[PageKey] = Counter()
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        return [key in self.pages for key in keys]

    def read(self, key: PageKey, buffer: memoryview) -> ReadStatus:
        self.reads[key] += 1
        self.begun.release()
        assert self.gate.wait(30)
        answer = self.answers.get(key, ReadStatus.HIT)
        if isinstance(answer, Exception):
            raise answer
        buffer[:] = page_of(key, PAGE) if answer is ReadStatus.HIT else bytes(PAGE)
        return answer


class Bench:
    """A store, an index and a prefetcher whose clock is set by hand."""

    def __init__(
        self, slots: int = 40, threads: int = 2, budget: int = 1 << 20, shared: bool = False
    ) -> None:
        self.store, self.now, self.slots = Store(KEYS), 0.0, slots
        self.index = HostIndex(slots, LruPolicy(slots), {0: PAGE})
        if shared:
            self.index = Machine(slots).start().index
        self.buffers = [memoryview(bytearray(PAGE)) for _ in range(slots)]
        self.prefetcher = Prefetcher(
            self.store,
            self.index,
            lambda page: ((page.key, self.buffers[page.slot]),),
            threads=threads,
            budget_bytes=budget,
            clock=lambda: self.now,
        )

    @property
    def lent(self) -> int:
        """Slots of pages that are being loaded."""
        return len(self.index) - len(self.loaded)

    @property
    def loaded(self) -> set[PageKey]:
        """The pages that are offered; the bytes of each have to be right."""
        pages = [page for key in KEYS if (page := self.index.get(key)) is not None and page.ready]
        assert all(self.buffers[page.slot] == page_of(page.key, PAGE) for page in pages)
        return {page.key for page in pages}

    def start(self, first: int, end: int, timeout: float | None = WAIT) -> PrefetchOperation:
        return self.prefetcher.start(f"{first}-{end}", KEYS[first:end], timeout)

    def wait(self, operation: PrefetchOperation) -> None:
        wait_for(self.prefetcher, operation)

    def begun(self, reads: int) -> None:
        for _ in range(reads):
            assert self.store.begun.acquire(timeout=30)


@pytest.fixture(params=["private", "shared"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def build(**options: int) -> Bench:
        benches.append(Bench(**options, shared=request.param == "shared"))
        return benches[-1]

    yield build
    for bench in benches:
        bench.store.gate.set()
        bench.prefetcher.close()
        # After every test no slot is lent, and no byte counts as in flight.
        assert bench.index.num_free == bench.slots - len(bench.loaded)
        assert bench.prefetcher.bytes_in_flight == 0


Make = Callable[..., Bench]


def test_all_is_loaded_and_published(make: Make) -> None:
    bench = make()
    operation = bench.start(0, 10)
    bench.wait(operation)
    assert operation.loaded == 10
    assert operation.ended
    assert not operation.cancelled
    assert bench.loaded == set(KEYS[:10])
    assert bench.prefetcher.poll() == [operation]
    assert bench.prefetcher.poll() == []
    counters = bench.prefetcher.counters.snapshot()
    assert counters == {"published": 10, "published_bytes": 640, "hit": 10}


def test_nothing_to_load_has_ended(make: Make) -> None:
    bench = make()
    operation = bench.start(0, 0)
    assert operation.ended
    assert operation.may_run()
    assert operation.loaded == 0
    assert bench.prefetcher.poll() == [operation]


@pytest.mark.parametrize(
    "answer", [ReadStatus.MISS, ReadStatus.CORRUPT, ReadStatus.ERROR, RuntimeError("third party")]
)
def test_a_failed_page_ends_the_prefix(make: Make, answer: ReadStatus | Exception) -> None:
    bench = make(threads=1)
    bench.store.answers[KEYS[4]] = answer
    operation = bench.start(0, 10)
    bench.wait(operation)
    assert operation.loaded == 4
    assert bench.loaded >= set(KEYS[:4])
    assert KEYS[4] not in bench.loaded
    status = answer if isinstance(answer, ReadStatus) else ReadStatus.ERROR
    assert bench.prefetcher.counters.snapshot()[status.value] == 1


def test_two_requests_share_one_load(make: Make) -> None:
    bench = make()
    bench.store.gate.clear()
    one, two = bench.start(0, 6), bench.start(0, 8)
    bench.begun(2)
    bench.store.gate.set()
    bench.wait(one)
    bench.wait(two)
    assert (one.loaded, two.loaded) == (6, 8)
    assert bench.store.reads == Counter(KEYS[:8])
    assert bench.prefetcher.counters.snapshot()["shared"] == 6


def test_a_shared_load_outlives_the_one_who_cancels(make: Make) -> None:
    bench = make()
    bench.store.gate.clear()
    one, two = bench.start(0, 6), bench.start(0, 6)
    one.cancel()
    assert bench.prefetcher.poll() == [one]
    bench.store.gate.set()
    bench.wait(two)
    assert one.loaded == 0
    assert two.loaded == 6
    assert bench.loaded == set(KEYS[:6])


def test_the_budget_bounds_what_is_in_flight(make: Make) -> None:
    bench = make(budget=3 * PAGE, threads=4)
    bench.store.gate.clear()
    operation = bench.start(0, 20)
    assert bench.prefetcher.bytes_in_flight == 3 * PAGE
    assert bench.lent == 3
    bench.begun(3)
    bench.store.gate.set()
    while not operation.ended:
        bench.prefetcher.poll()
        assert bench.prefetcher.bytes_in_flight <= 3 * PAGE
    assert operation.loaded == 20


def test_a_long_prompt_has_no_more_loads_in_flight_than_the_threads_need(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load costs the scheduler's thread time, and a prompt may have many thousands."""
    monkeypatch.setattr(prefetcher, "MOST_LOADS", 4)
    bench = make(threads=2)
    bench.store.gate.clear()
    operation, other = bench.start(0, 20), bench.start(2, 22)
    assert bench.lent == 4
    bench.store.gate.set()
    while not (operation.ended and other.ended):
        bench.prefetcher.poll()
        assert bench.lent <= 4
    assert operation.loaded == other.loaded == 20


def test_a_full_pool_cuts_the_prefix(make: Make) -> None:
    bench = make(slots=5)
    bench.store.gate.clear()
    operation = bench.start(0, 20)
    bench.store.gate.set()
    bench.wait(operation)
    assert operation.loaded == 5
    assert bench.prefetcher.counters.snapshot()["no_slot"] == 1


def test_a_cancelled_one_gives_back_what_no_thread_has(make: Make) -> None:
    bench = make(threads=2)
    bench.store.gate.clear()
    operation = bench.start(0, 10)
    bench.begun(2)
    operation.cancel()
    operation.cancel()
    assert bench.prefetcher.poll() == [operation]
    # Two threads are still writing: their slots are not given to anybody else.
    assert bench.lent == 2
    assert bench.index.num_free == 38
    bench.store.gate.set()
    bench.prefetcher.close()
    assert bench.index.num_free == 40
    assert bench.loaded == set()
    assert bench.prefetcher.counters.snapshot() == {"released": 10, "cancelled": 10}


def test_cancelling_what_has_ended_changes_nothing(make: Make) -> None:
    bench = make()
    operation = bench.start(0, 5)
    bench.wait(operation)
    operation.cancel()
    assert not operation.cancelled
    assert operation.loaded == 5


def test_best_effort_runs_with_what_has_come(make: Make) -> None:
    bench = make()
    bench.store.gate.clear()
    operation = bench.start(0, 5, BEST)
    assert operation.may_run()
    assert not operation.ended
    operation.cancel()
    assert operation.loaded == 0
    assert bench.prefetcher.poll() == [operation]


def test_wait_complete_waits_whatever_the_clock_says(make: Make) -> None:
    bench = make()
    bench.store.gate.clear()
    operation = bench.start(0, 5, WAIT)
    bench.now = 1e9
    bench.prefetcher.poll()
    assert not operation.may_run()
    bench.store.gate.set()
    bench.wait(operation)
    assert operation.may_run()


def test_a_deadline_takes_what_has_come(make: Make) -> None:
    bench = make(threads=1, budget=2 * PAGE)
    operation = bench.start(0, 10, 5.0)
    while operation.loaded < 2:
        bench.prefetcher.poll()
    bench.store.gate.clear()
    bench.now = 4.9
    assert not operation.may_run()
    bench.now = 5.0
    assert operation.may_run()
    assert operation.timed_out
    loaded = operation.loaded
    assert 2 <= loaded < 10
    assert bench.prefetcher.poll() == [operation]
    bench.store.gate.set()
    bench.prefetcher.close()
    assert operation.loaded == loaded
    assert len(bench.loaded) >= loaded


def test_a_slow_request_does_not_hold_up_another(make: Make) -> None:
    """One waits for a page that does not come, while the other's pages come."""
    bench = make(threads=2)
    stuck = threading.Event()
    original = bench.store.read

    def read(key: PageKey, buffer: memoryview) -> ReadStatus:
        if key == KEYS[0]:
            stuck.wait(30)
        return original(key, buffer)

    bench.store.read = read  # type: ignore[method-assign]
    slow, fast = bench.start(0, 1), bench.start(10, 20)
    bench.wait(fast)
    assert fast.loaded == 10
    assert not slow.ended
    stuck.set()
    bench.wait(slow)


def test_closed_it_loads_nothing_more(make: Make) -> None:
    bench = make()
    bench.prefetcher.close()
    operation = bench.start(0, 5)
    assert operation.ended
    assert bench.store.reads == Counter()
    bench.prefetcher.close()


@pytest.mark.parametrize("seed", range(6))
def test_cancels_that_race_give_everything_back_once(make: Make, seed: int) -> None:
    """Operations over the same keys, cancelled by other threads while they end."""
    bench, rng = make(slots=12, threads=3, budget=6 * PAGE), random.Random(seed)
    cancellers = []
    running: list[PrefetchOperation] = []
    for number in range(150):
        first = rng.randrange(30)
        timeout = rng.choice([WAIT, BEST, rng.random()])
        operation = bench.prefetcher.start(
            str(number), KEYS[first : first + rng.randrange(1, 9)], timeout
        )
        running.append(operation)
        if rng.random() < 0.6:
            cancellers.append(threading.Thread(target=operation.cancel))
            cancellers[-1].start()
        bench.now += 0.01
        for ended in bench.prefetcher.poll():
            running.remove(ended)
        # The pool evicts: its pages are free again, and may be loaded again.
        bench.index.forget([page for key in bench.loaded if (page := bench.index.get(key))])
    for thread in cancellers:
        thread.join(30)
    for operation in running:
        operation.cancel()
    bench.prefetcher.close()
    assert bench.lent == 0
    counters = bench.prefetcher.counters.snapshot()
    assert counters["published"] > 0
    assert counters["cancelled"] > 0


def test_requests_do_not_wait_for_ever_anew_for_storage_that_hangs() -> None:
    """After some timeouts no request waits, except for one now and then that tries again."""
    group = Group(0, 16, 1, HitPolicy.ALL_PAGES, 0, PAGE, ("layers.0",))
    geometry = SimpleNamespace(groups=(group,))
    # Prefill makes pages at 4 MB/s, storage is thought to be eight times as fast.
    cost = CostModel()
    cost.prefill.value = 1e6
    cost.disk.value = 8 * PAGE * 1e6 / 16
    stats, tier = HiCacheStats(), HungTier()
    prefetches = StorageReads(tier, geometry, HostIndex(8, LruPolicy(8), {0: PAGE}), cost, stats)  # type: ignore[arg-type]
    waited = []
    for number in range(120):
        request = SimpleNamespace(request_id=str(number), block_hashes=[])
        state = SimpleNamespace(request=request, keys={0: KEYS[:2]})
        prefetches.arrived(state, 32)  # type: ignore[arg-type]
        if str(number) in tier.operations:
            waited.append(number)
            tier.now += 100.0
        assert prefetches.may_run(state, True)  # type: ignore[arg-type]
    assert waited[:3] == [0, 1, 2]
    assert stats.data["prefetch_timeouts"] == len(waited)
    assert stats.data["recomputed"] == 120 - len(waited)
    late = [number for number in waited if number >= 40]
    assert [late[1] - late[0], late[2] - late[1]] == [PROBE_EVERY] * 2


class HungTier:
    """Storage that has every page, and gives none."""

    bytes_in_flight = written = errors = declined = dropped = 0

    def __init__(self) -> None:
        self.now = 0.0
        self.operations: dict[str, PrefetchOperation] = {}

    def is_incoming(self, key: PageKey) -> bool:
        return False

    def contains(self, keys: Sequence[PageKey]) -> dict[PageKey, bool]:
        return dict.fromkeys(keys, True)

    def prefetch(self, request_id: str, keys: Sequence[PageKey], tokens: int) -> PrefetchOperation:
        operation = PrefetchOperation(request_id, keys, self.now + 1, lambda: self.now)
        self.operations[request_id] = operation
        return operation

    def poll(self) -> list[PrefetchOperation]:
        return []
