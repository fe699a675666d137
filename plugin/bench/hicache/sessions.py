"""Sessions of several turns: when each sends its next turn, and the answers that come."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vllm_graft.bench.hicache.prompt_driver import Answer, Driver

Said = Callable[[int, int], list[int]]
"""What the user of a session says in a turn, as token ids."""


class ClosedLoad:
    """Lets all sessions talk at once: each sends its next turn as soon as it has its answer."""

    def __init__(self, sessions: int) -> None:
        self._idle = list(range(sessions))

    def due(self, now: float) -> Iterator[tuple[float, int]]:
        """Yield the time and the session of each turn that has come by ``now``, in seconds."""
        while self._idle:
            yield now, self._idle.pop(0)

    def ready(self, session: int) -> None:
        """Take in that a session has its answer, and has more to say."""
        self._idle.append(session)


class OpenLoad(ClosedLoad):
    """Turns that come at random times, ``rate`` a second, however long answers take. A turn is one
    of the session that was answered last (with the probability ``sticky``), or of any session that
    has its answer. If none has, the turn waits for one, which counts."""

    def __init__(self, sessions: int, rate: float, sticky: float, seed: str) -> None:
        super().__init__(sessions)
        self._random = random.Random(seed)
        self._rate, self._sticky = rate, sticky
        self._next: float | None = None

    def due(self, now: float) -> Iterator[tuple[float, int]]:
        """Yield the turns that have come by ``now``, with the times at which they came."""
        if self._next is None:
            self._next = now + self._random.expovariate(self._rate)
        while self._idle and self._next <= now:
            last = self._random.random() < self._sticky
            place = -1 if last else self._random.randrange(len(self._idle))
            yield self._next, self._idle.pop(place)
            self._next += self._random.expovariate(self._rate)


def length_between(least: int, most: int, seed: str) -> int:
    """A length from ``least`` to ``most``, each octave as likely as the others."""
    return round(least * math.exp(random.Random(seed).random() * math.log(most / least)))


@dataclass
class Sessions:
    """Sessions of ``turns`` turns, whose answers have ``reply`` tokens. ``answers`` has the turn
    and the answer of each turn that has ended."""

    load: ClosedLoad
    said: Said
    turns: int
    reply: int
    answers: list[tuple[int, Answer]] = field(default_factory=list)

    def run(self, driver: Driver, sessions: int, deadline: float) -> None:
        """Let the sessions talk until all have ended or the driver's clock says ``deadline``."""
        texts = [self.said(session, 0) for session in range(sessions)]
        turns, talking = [0] * sessions, sessions
        session_of: dict[str, int] = {}
        while talking and (now := driver.now()) < deadline:
            for came, session in self.load.due(now):
                name = driver.submit(texts[session], self.reply, came)
                session_of[name] = session
            if not session_of:
                driver.rest()
                continue
            for name, answer in driver.step().items():
                session = session_of.pop(name)
                self.answers.append((turns[session], answer))
                turns[session] += 1
                if turns[session] < self.turns:
                    said = self.said(session, turns[session])
                    texts[session] = answer.prompt + answer.tokens + said
                    self.load.ready(session)
                else:
                    talking -= 1
