"""Engines that share a pool on one machine, each with a clock of its own, and that die at any
write."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from vllm_graft.base.locks import ByteLocks
from vllm_graft.hicache.host import shared_slots
from vllm_graft.hicache.host.index import Page
from vllm_graft.hicache.host.shared_index import SharedIndex
from vllm_graft.hicache.host.shared_slots import FILLING, SharedSlots, control_bytes
from vllm_graft.hicache.pages.page_key import PageKey

SPACE = b"namespace".ljust(16, b"-")
DEVICE_SECONDS = 1.0
"""Seconds for which a dead engine's device may still copy."""

APART = 3600 * 10**9
"""Nanoseconds between the clocks of two engines, as those of time namespaces differ."""


class Killed(BaseException):
    """The process has died, before a write that the budget has no room for."""


class Traced(np.ndarray[Any, Any]):
    """An array that is written to one element after the other, as long as there is budget."""

    budget: int | None = None

    def __setitem__(self, where: Any, value: Any) -> None:
        if Traced.budget is None:
            super().__setitem__(where, value)
            return
        plain = self.view(np.ndarray)
        places = np.arange(self.size).reshape(self.shape)[where]
        values = np.broadcast_to(np.asarray(value, self.dtype), places.shape)
        for place, one in zip(places.ravel().tolist(), values.ravel().tolist()):
            if Traced.budget == 0:
                raise Killed
            Traced.budget -= 1
            plain[np.unravel_index(place, self.shape)] = one


class TracedSlots(SharedSlots):
    def __setattr__(self, name: str, value: Any) -> None:
        traced = isinstance(value, np.ndarray)
        super().__setattr__(name, value.view(Traced) if traced else value)


class Machine:
    """The shared memory: the control of slots, and the page that was last copied to each."""

    def __init__(self, num_slots: int) -> None:
        self._file, self.num_slots = os.memfd_create("locks"), num_slots
        self.memory = memoryview(bytearray(control_bytes(num_slots)))
        self.content: list[object] = [None] * num_slots
        self.now = 10**12
        self.engines: list[Engine] = []
        self._late: list[tuple[int, int]] = []
        self._started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self._file, *(engine.fd for engine in self.engines)):
            os.close(fd)

    def open(self) -> int:
        """Open the file that is locked once more."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)

    def start(self) -> Engine:
        self._started += 1
        engine = Engine(self, self._started)
        self.engines.append(engine)
        return engine

    def wait(self, seconds: float) -> None:
        """Let time pass, in which the devices of dead engines end what they had begun."""
        self.now += int(seconds * 1e9)
        for end, slot in self._late:
            if self.now >= end:
                self.content[slot] = "what a dead engine's device copied late"
        self._late = [each for each in self._late if self.now < each[0]]

    def bury(self, engine: Engine) -> None:
        """Let an engine's process end, and its device go on for a while."""
        row, slots = engine.slots.row, engine.slots
        mine = np.flatnonzero((slots.owner == row + 1) & (slots.state == FILLING)).tolist()
        os.close(engine.fd)
        self.engines.remove(engine)
        self._late += [(self.now + int(DEVICE_SECONDS * 1e9), slot) for slot in mine]

    def check(self) -> None:
        """What an engine holds and may read is the page that it asked for; two do not fill one."""
        filling: list[int] = []
        for engine in self.engines:
            for page in engine.index._ours.values():
                if page.ready:
                    assert self.content[page.slot] == page.key, "a wrong page is read"
                else:
                    filling.append(page.slot)
        assert len(filling) == len(set(filling)), "two engines fill one slot"

    def check_all(self, keys: Sequence[PageKey]) -> None:
        """Whatever can be found is right, and no slot or row is lost."""
        for engine in self.engines:
            for key in keys:
                if (pages := engine.index.hold([key])) is not None:
                    self.check()
                    engine.index.release(pages)
        for engine in self.engines:
            engine.let_go()
        last = self.engines[-1]
        for _ in range(2):
            self.wait(shared_slots.GRACE_SECONDS + 0.1)
            with last.slots.locked() as had:
                assert had
                last.slots.care()
        slots = last.slots
        assert not slots.pins.any()
        assert len(slots._rows()) == len(self.engines)
        fresh = [PageKey(b"fresh %d" % number, 0) for number in range(self.num_slots)]
        pages = last.index.reserve(fresh)
        assert pages is not None, "a slot is lost"
        assert sorted(page.slot for page in pages) == list(range(self.num_slots))
        self.wait(10)
        last.copy(pages)
        last.index.commit(pages)
        self.check()


class Engine:
    """An engine with the operations of its controller, one page's slot after the other."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.machine = machine
        self.fd = machine.open()
        try:
            self.slots = TracedSlots(
                machine.memory,
                machine.num_slots,
                ByteLocks(self.fd),
                number.to_bytes(16, "little"),
                lambda: machine.now + number % 3 * APART,
            )
            shape = SimpleNamespace(num_slots=machine.num_slots)
            pool: Any = SimpleNamespace(shape=shape, shared=self.slots)
            self.index = SharedIndex(pool, SPACE, {0: 1})
        except BaseException:
            os.close(self.fd)
            raise
        self.storing: list[list[Page]] = []
        self.loading: list[list[Page]] = []

    def store(self, keys: Sequence[PageKey]) -> None:
        if pages := self.index.reserve(keys):
            self.storing.append(pages)

    def copy(self, pages: Sequence[Page]) -> None:
        for page in pages:
            self.machine.content[page.slot] = page.key

    def stored(self) -> None:
        if self.storing:
            pages = self.storing.pop(0)
            self.copy(pages)
            self.index.commit(pages)

    def failed(self) -> None:
        """End a store that a rank could not do, or a load."""
        if jobs := self.storing or self.loading:
            pages = jobs.pop(0)
            self.index.forget(pages)
            self.index.release(pages)

    def load(self, keys: Sequence[PageKey]) -> None:
        if (pages := self.index.hold(keys)) is not None:
            self.loading.append(pages)

    def offer(self, keys: Sequence[PageKey]) -> None:
        self.index.look()
        if all(map(self.index.has, keys)):
            self.index.offer(keys)

    def offered(self, keys: Sequence[PageKey]) -> None:
        """Take an offer, as vLLM does within the same step; it cannot fail."""
        self.index.look()
        if self.index.offer(keys):
            pages = self.index.hold(keys)
            assert pages is not None
            self.loading.append(pages)
        self.index.end_offers()

    def loaded(self) -> None:
        if self.loading:
            self.index.release(self.loading.pop(0))

    def use(self, keys: Sequence[PageKey]) -> None:
        self.index.touch(keys)

    def clear(self) -> None:
        self.index.clear()

    def empty(self) -> None:
        self.clear()
        assert self.index.empty()

    def let_go(self) -> None:
        self.index.end_offers()
        for pages in self.storing:
            self.copy(pages)
            self.index.commit(pages)
        for pages in self.loading:
            self.index.release(pages)
        self.storing, self.loading = [], []


@contextmanager
def budget(writes: int | None) -> Iterator[None]:
    """Let a process write so often inside, and then die."""
    Traced.budget = writes
    try:
        yield
    finally:
        Traced.budget = None


def dies(engine: Engine, act: Callable[[], object], writes: int) -> bool:
    """Kill an engine behind so many writes of an act; False if the act has ended before."""
    try:
        with budget(writes):
            act()
    except Killed:
        engine.machine.bury(engine)
        return True
    return False
