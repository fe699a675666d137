"""When drafts that cost no pass of a model rest, because the texts do not repeat themselves."""

from __future__ import annotations

import enum
from collections import deque

TRIAL = 12
"""Steps that are drafted for, at least, before they are judged."""

PROBE = 3
"""The same after a rest. Probes have the fewest nodes, so that they cost next to nothing."""

WINDOW = 24
"""Latest drafted steps that are judged: a copy that has ended is soon forgotten."""

REST = 16
"""Steps of the first rest."""

LONGEST = 64
"""Steps of a rest at most. Each is twice as long as the last while probes find nothing."""


class Phase(enum.Enum):
    """What is drafted for a step."""

    DRAFT = enum.auto()
    PROBE = enum.auto()
    REST = enum.auto()


class Rests:
    """Whether to draft at all, by what drafts have just yielded, where most texts yield nothing.

    Estimates of acceptance are hopeful, so that numbers of nodes get tried; a draft model always
    yields something. What counts here is the surplus alone: tokens of a request per drafted step,
    less those that would have come without drafts in the time of such a step.
    """

    def __init__(self) -> None:
        self._phase = Phase.DRAFT
        self._surplus: deque[float] = deque(maxlen=WINDOW)
        self._left = 0
        self._rest = REST

    def begin_step(self) -> Phase:
        """The phase of the next step, which uses up one step of a rest."""
        if self._phase is Phase.REST:
            if self._left > 0:
                self._left -= 1
                return Phase.REST
            self._begin(Phase.PROBE)
        return self._phase

    def observe(self, tokens: float, ratio: float, *, same: bool) -> None:
        """Learn from a step.

        Args:
            tokens: mean tokens of the decoding requests; 0 if none had drafts.
            ratio: the step's time over that of one without drafts.
            same: whether most of the requests were in the step before. Others may repeat
                themselves, so that a rest ends.
        """
        if self._phase is Phase.REST:
            # Drafts of the steps before the rest are verified in it.
            self._left = self._left if same else 0
            return
        if not tokens:
            return
        self._surplus.append(tokens - ratio)
        if len(self._surplus) < (PROBE if self._phase is Phase.PROBE else TRIAL):
            return
        if sum(self._surplus) < 0:
            self._left, self._rest = self._rest, min(2 * self._rest, LONGEST)
            self._begin(Phase.REST)
        elif self._phase is Phase.PROBE:
            self._phase = Phase.DRAFT
        else:
            self._rest = REST

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        self._surplus.clear()
