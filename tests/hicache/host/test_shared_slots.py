"""A pool that engines share: whatever instruction one dies at, the others read no wrong page, and
get all of its slots back."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.host_cache.dying_engines import Engine, Machine, Traced, budget, dies
from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.base.locks import ByteLocks
from vllm_graft.hicache.host import shared_slots
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.host.shared_slots import FILLING, READY, USES, SharedSlots, _ranges
from vllm_graft.hicache.pages.page_key import PageKey

SLOTS = 6


@pytest.fixture
def machine() -> Iterator[Machine]:
    with Machine(SLOTS) as found:
        yield found


KEYS = [PageKey(bytes([number]) * 32, number % 2) for number in range(12)]

Act = Callable[[Engine, Engine], object]
ACTS: dict[str, tuple[list[Act], Act]] = {
    "store": ([], lambda one, two: one.store(KEYS[:3])),
    "store and evict": (
        [lambda one, two: two.store(KEYS[:6]), lambda one, two: two.stored()],
        lambda one, two: one.store(KEYS[6:10]),
    ),
    "complete": ([lambda one, two: one.store(KEYS[:3])], lambda one, two: one.stored()),
    "fail": ([lambda one, two: one.store(KEYS[:3])], lambda one, two: one.failed()),
    "load": (
        [lambda one, two: two.store(KEYS[:3]), lambda one, two: two.stored()],
        lambda one, two: one.load(KEYS[:3]),
    ),
    "loaded": (
        [
            lambda one, two: two.store(KEYS[:3]),
            lambda one, two: two.stored(),
            lambda one, two: one.load(KEYS[:3]),
        ],
        lambda one, two: one.loaded(),
    ),
    "forget what both read": (
        [
            lambda one, two: two.store(KEYS[:3]),
            lambda one, two: two.stored(),
            lambda one, two: one.load(KEYS[:3]),
            lambda one, two: two.load(KEYS[:3]),
        ],
        lambda one, two: one.failed(),
    ),
    "empty": (
        [
            lambda one, two: two.store(KEYS[:3]),
            lambda one, two: two.stored(),
            lambda one, two: two.load(KEYS[:2]),
            lambda one, two: one.store(KEYS[3:5]),
        ],
        lambda one, two: one.empty(),
    ),
    "care for the dead": (
        [
            lambda one, two: _die_filling(one.machine),
            lambda one, two: one.machine.wait(5),
            lambda one, two: one.store(KEYS[6:8]),
            lambda one, two: one.machine.wait(5),
        ],
        lambda one, two: one.store(KEYS[8:]),
    ),
}


def _die_filling(machine: Machine) -> None:
    third = machine.start()
    third.store(KEYS[:2])
    third.stored()
    third.load(KEYS[:2])
    third.store(KEYS[2:4])
    machine.bury(third)


@pytest.mark.parametrize("name", list(ACTS))
def test_an_engine_may_die_before_any_write(name: str) -> None:
    before, act = ACTS[name]
    writes = 0
    while True:
        with Machine(SLOTS) as machine:
            one, two = machine.start(), machine.start()
            for earlier in before:
                earlier(one, two)
            dead = dies(one, lambda: act(one, two), writes)  # noqa: B023
            machine.check()
            two.store(KEYS[4:7])
            machine.check()
            two.stored()
            machine.check()
            machine.check_all(KEYS)
        writes += 1
        if not dead:
            break
    assert writes > 3


def test_an_engine_may_die_while_it_joins(machine: Machine) -> None:
    one = machine.start()
    one.store(KEYS[:3])
    one.stored()
    for writes in range(17):
        with budget(writes):
            try:
                machine.start()
            except BaseException:
                continue
            break
    assert writes == 16
    machine.check_all(KEYS)


STORES, LOADS = ("store",) * 3 + ("stored",) * 2, ("load", "load", "offered", "loaded")
STEPS = st.tuples(
    st.integers(0, 2),
    st.sampled_from(STORES + LOADS + ("failed", "use", "clear", "empty", "wait", "die", "start")),
    st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=4),
    st.none() | st.integers(0, 300),
)


def _walk(steps: list[Any]) -> None:
    with Machine(SLOTS) as machine:
        _walk_on(steps, machine)


def _walk_on(steps: list[Any], machine: Machine) -> None:
    for _ in range(3):
        machine.start()
    for number, name, keys, writes in steps:
        engine = machine.engines[number % len(machine.engines)]
        machine.wait(0.01)
        if name == "wait":
            machine.wait(0.7)
        elif name == "start" or (name == "die" and len(machine.engines) == 1):
            if len(machine.engines) < 4:
                machine.start()
        elif name == "die":
            machine.bury(engine)
        else:
            act = getattr(engine, name)
            given = (keys,) if name in ("store", "load", "offered", "use") else ()
            if writes is None or len(machine.engines) == 1:
                act(*given)
            else:
                dies(engine, lambda: act(*given), writes)  # noqa: B023
        machine.check()
    machine.check_all(KEYS)


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=150, deadline=None)
def test_engines_that_come_and_die_read_no_wrong_page(steps: list[Any]) -> None:
    _walk(steps)


def _ready_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = SharedSlots.fill

    def filled(self: SharedSlots, slots: Any, records: Any) -> None:
        fill(self, slots, records)
        self.state[slots] = READY

    monkeypatch.setattr(SharedSlots, "fill", filled)


def _pins_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned(self: SharedSlots, slots: Any) -> bool:
        return not (self.state[slots] != READY).any()

    monkeypatch.setattr(SharedSlots, "pin", pinned)


def _no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_slots, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(shared_slots, "CARE_SECONDS", 0.0)


def _no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is dead can't be told then, so the living are robbed."""
    monkeypatch.setattr(ByteLocks, "elsewhere", lambda self, byte: False)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (_ready_at_once, "a wrong page is read"),
        (_pins_do_not_count, "a wrong page is read"),
        (_no_grace, "a wrong page is read"),
        (_no_lock, None),
    ],
)
def test_the_walk_finds_what_is_broken(
    broken: Callable[[pytest.MonkeyPatch], None],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative controls, each with the shortest walk that shows it."""
    broken(monkeypatch)
    both: list[Any] = [(0, "store", KEYS[:6], None), (0, "stored", [], None)]
    walks: list[list[Any]] = [
        [(0, "store", KEYS[:2], None), (1, "load", KEYS[:2], None)],
        [*both, (0, "load", KEYS[:2], None), (1, "store", KEYS[6:], None), (1, "stored", [], None)],
        [
            (0, "store", KEYS[:6], None),
            (0, "die", [], None),
            (0, "store", KEYS[6:10], None),
            (0, "wait", [], None),
            (0, "store", KEYS[6:10], None),
            (0, "stored", [], None),
            (0, "load", KEYS[6:10], None),
            *[(0, "wait", [], None)] * 2,
        ],
        [(0, "store", KEYS[:6], None), *[(1, "wait", [], None), (1, "store", KEYS[6:], None)] * 8],
    ]
    failures = []
    for walk in walks:
        try:
            _walk(walk)
        except AssertionError as error:
            failures.append(str(error))
    assert failures
    assert words is None or any(words in failure for failure in failures)


@pytest.fixture
def pair(machine: Machine) -> tuple[Engine, Engine]:
    return machine.start(), machine.start()


def test_one_fills_a_page_and_the_other_does_not_store_it(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    one.store(KEYS[:3])
    two.store(KEYS[1:5])
    assert [page.key for page in two.storing[0]] == KEYS[3:5]
    assert two.index.hold(KEYS[:1]) is None
    one.stored()
    assert [page.of_other for page in two.index.hold(KEYS[:3]) or ()] == [True] * 3
    assert [page.of_other for page in one.index.hold(KEYS[:3]) or ()] == [False] * 3
    two.stored()
    two.store(KEYS[:5])
    assert two.storing == []


def test_the_page_that_nobody_has_used_for_longest_leaves(pair: tuple[Engine, Engine]) -> None:
    """Whoever has written it: uses of both count alike, and the tail leaves before the head."""
    one, two = pair
    for engine, keys in ((one, KEYS[:3]), (two, KEYS[3:6])):
        engine.machine.wait(1)
        engine.store(keys)
        engine.stored()
    one.machine.wait(1)
    two.index.look()
    two.use(KEYS[1:2])
    one.store(KEYS[6:9])
    assert [key in map(KEYS.__getitem__, (1, 3, 4)) for key in KEYS[:6]] == [
        two.index.has(key) for key in KEYS[:6]
    ]
    assert one.index.counts()["evictions"] == 3


def test_a_reset_empties_the_pool_for_all(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    for engine, keys in ((one, KEYS[:2]), (two, KEYS[2:4])):
        engine.store(keys)
        engine.stored()
    two.load(KEYS[:1])
    two.store(KEYS[4:5])
    one.empty()
    assert not any(two.index.has(key) for key in KEYS[:4])
    one.machine.check()
    two.stored()
    assert one.index.hold(KEYS[4:5]) is not None
    two.loaded()
    two.store(KEYS[6:11])
    assert len(two.storing[0]) == 5


def test_pages_of_other_namespaces_are_not_found(machine: Machine) -> None:
    one, two = machine.start(), machine.start()
    two.index._space = b"another".ljust(16)
    one.store(KEYS[:2])
    one.stored()
    two.index.look()
    assert not two.index.has(KEYS[0])
    two.store(KEYS[:2])
    assert len(two.storing[0]) == 2


def test_an_engine_that_is_stopped_with_the_lock_costs_hits_and_no_time(
    pair: tuple[Engine, Engine],
) -> None:
    """SIGSTOP, swapping, a debugger: the others go on, without the pool until it goes on."""
    one, two = pair
    one.store(KEYS[:3])
    one.stored()
    two.index.look()
    with one.slots.locked() as had:
        assert had
        began = time.monotonic()
        for _ in range(100):
            two.offered(KEYS[:3])
            two.store(KEYS[4:5])
        assert time.monotonic() - began < 0.5
        assert not two.loading
        assert not two.storing
        assert two.index.empty() is False
    two.offered(KEYS[:3])
    assert len(two.loading[0]) == 3
    counts = two.index.counts()
    assert counts["lock_timeouts"] >= 200
    assert counts["sharing_engines"] == 2


def test_what_is_held_is_let_go_without_the_lock(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    one.store(KEYS[:3])
    one.stored()
    one.load(KEYS[:3])
    one.store(KEYS[3:5])
    with two.slots.locked():
        one.loaded()
        one.stored()
    assert not two.slots.pins.any()
    two.load(KEYS[:5])
    assert two.loading


def test_a_process_joins_the_row_of_its_engine(machine: Machine) -> None:
    """It lives as long as one of them: a rank may copy when its scheduler is dead."""
    one, other = machine.start(), machine.start()
    rank = machine.open()
    found = SharedSlots(
        machine.memory, SLOTS, ByteLocks(rank), (2).to_bytes(16, "little"), lambda: machine.now
    )
    assert found.row == other.slots.row != one.slots.row
    assert found.accompanied
    assert other.slots.accompanied
    assert not one.slots.accompanied
    with pytest.raises(GraftError, match="same VllmConfig"):
        found.claim_scheduler()
    other.store(KEYS[:2])
    machine.bury(other)
    for _ in range(3):
        machine.wait(10)
        one.store(KEYS[4:8])
    assert (one.slots.state == FILLING).sum() == 6
    assert one.slots.alive == 2
    os.close(rank)
    for _ in range(3):
        machine.wait(10)
        one.index.look()
    assert not any(map(one.index.get, KEYS[:2])), "nobody waits for what a dead engine was filling"
    assert one.index.counts()["reaped_engines"] == 1


def test_a_pool_has_rows_for_so_many(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_slots, "JOIN_SECONDS", 0.2)
    for _ in range(shared_slots.OWNERS):
        machine.start()
    with pytest.raises(ConfigError, match="32 engines share this host memory already"):
        machine.start()
    machine.bury(machine.engines[7])
    for _ in range(2):
        machine.wait(10)
        with machine.engines[0].slots.locked():
            pass
    assert machine.start().slots.row == 7
    with (
        machine.engines[0].slots.locked(),
        pytest.raises(GraftError, match="a server that shares it is stopped"),
    ):
        machine.start()


def test_slots_are_taken_in_ranges() -> None:
    free = np.array([0, 1, 2, 5, 6, 9, 11, 12, 13, 14])
    assert _ranges(free, 2).tolist() == [5, 6]
    assert _ranges(free, 3).tolist() == [0, 1, 2]
    assert _ranges(free, 4).tolist() == [11, 12, 13, 14]
    assert _ranges(free, 6).tolist() == [0, 1, 11, 12, 13, 14]
    assert _ranges(free, 10).tolist() == free.tolist()


def test_who_lags_behind_the_log_reads_all_slots(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    for first in (0, 4, 8, 0):
        one.machine.wait(1)
        one.store(KEYS[first : first + 4])
        one.stored()
    assert sum(map(two.index.has, KEYS)) == 0
    two.index.look()
    assert [two.index.has(key) for key in KEYS] == [one.index.has(key) for key in KEYS]
    assert sum(map(two.index.has, KEYS)) == SLOTS


def test_who_reads_all_slots_keeps_nobody_from_the_lock(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that starts reads a hundred thousand slots for half a second."""
    one, two = pair
    for first in (0, 4, 8):
        one.store(KEYS[first : first + 4])
        one.stored()
    take, free = SharedIndex._take, list[bool]()

    def observed(self: SharedIndex, slots: Sequence[int], records: bytes) -> None:
        with one.slots.locked() as had:
            free.append(had)
        take(self, slots, records)

    monkeypatch.setattr(SharedIndex, "_take", observed)
    assert two.index._is_behind
    two.offered(KEYS[8:])
    assert free == [True]
    assert [page.key for page in two.loading[0]] == KEYS[8:]
    one.machine.check()


def test_pages_that_have_left_are_no_more_of_storage(pair: tuple[Engine, Engine]) -> None:
    """An engine that does not look for long keeps nothing of what it has read."""
    one, two = pair
    for number in range(0, 40, 4):
        keys = [PageKey(b"read %d" % each, 0) for each in range(number, number + 4)]
        read = one.index.reserve(keys, from_storage=True)
        assert read is not None
        one.copy(read)
        one.index.commit(read)
        for first in (0, 4, 8):
            two.machine.wait(1)
            two.store(KEYS[first : first + 4])
            two.stored()
        one.index.look()
    assert not one.index._read


def test_what_was_forgotten_without_the_lock_is_not_offered(pair: tuple[Engine, Engine]) -> None:
    """Else a request would be promised what another load of it has just failed to bring."""
    one, two = pair
    one.store(KEYS[:3])
    one.stored()
    one.load(KEYS[:3])
    one.load(KEYS[:3])
    with two.slots.locked() as had:
        assert had
        one.failed()
    assert not any(map(one.index.has, KEYS[:3]))
    one.offered(KEYS[:3])
    assert len(one.loading) == 1
    two.index.look()
    two.load(KEYS[:3])
    assert two.loading
    one.store(KEYS[:3])
    one.stored()
    one.offered(KEYS[:3])
    one.machine.check()
    assert len(one.loading) == 2


def test_an_engine_that_was_stopped_amid_a_use_turns_no_order_round(machine: Machine) -> None:
    one, two = machine.start(), machine.start()
    one.store(KEYS[:SLOTS])
    one.stored()
    read = int(one.slots.head[USES])
    two.index.look()
    for _ in range(9):
        two.use(KEYS[:SLOTS])
    one.slots.head[USES] = read + 1
    for key in KEYS[SLOTS : SLOTS + 2]:
        two.store([key])
        two.stored()
    two.index.look()
    assert list(map(two.index.has, KEYS[: SLOTS + 2])) == [False] * 2 + [True] * SLOTS


def test_traced_arrays_are_written_as_others() -> None:
    """The check of the checker."""
    plain = np.zeros((3, 4), np.int64)
    traced = plain.copy().view(Traced)
    for where, value in [((1, [0, 2]), 5), (2, np.arange(4)), ((slice(None), 1), [7, 8, 9])]:
        plain[where] = value
        with budget(100):
            traced[where] = value
    assert traced.tolist() == plain.tolist()
