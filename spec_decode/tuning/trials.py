"""Trials of other numbers of nodes, which tell whether measured costs are wrong."""

from collections.abc import Mapping
from dataclasses import dataclass, field

WAIT = 4
"""Choices between trials, at least, and before the first: a new size's steps are not timed."""

SHARE = 0.002
"""The part of all steps that trials may lose while costs prove right, at first."""

LEAST_SHARE = 0.0003
"""The rest of `SHARE` after many rounds. The machine may change at any time."""


@dataclass
class _Account:
    """Trials of one batch size.

    Attributes:
        saved: steps that trials may lose.
        share: the part of all steps that is saved for them.
        wait: choices before the next trial, at least.
        doubtful: whether nothing is known of the costs yet, or the latest news was of a wrong one.
        trial: the number that is being tried, and the steps that it loses if its cost is right.
    """

    saved: float = 0.0
    share: float = SHARE
    wait: int = WAIT
    doubtful: bool = True
    found: bool = False
    wrong: set[int] = field(default_factory=set)
    tried: set[int] = field(default_factory=set)
    trial: tuple[int, float] | None = None

    def judge(self, judged: Mapping[int, bool]) -> None:
        news = {nodes for nodes, is_wrong in judged.items() if is_wrong} - self.wrong
        self.wrong |= news
        if news:
            self.doubtful = self.found = True
        if self.trial is None:
            return
        (nodes, price), self.trial, self.wait = self.trial, None, WAIT
        if nodes in news:
            return
        self.saved -= price
        self.doubtful = False
        if nodes not in judged:
            # Prompts ran in too many of its steps. It is tried again.
            self.tried.discard(nodes)

    def begin_round(self, best: int) -> None:
        """Begin anew once all numbers were tried, and more slowly if no cost was found wrong."""
        self.tried = {best}
        self.share = SHARE if self.found else max(self.share / 2, LEAST_SHARE)
        self.found = False


class Trials:
    """When to try another number of nodes instead of the best one, by batch size.

    Nothing tells whether the cost of a number is right that is never chosen. So each is tried, the
    better it seems the sooner, and none twice before all were tried. A trial's price, which it
    loses if the measured cost is right, is saved up before: right costs lose a small part of all
    steps, and half as much in each further round. The first trial doesn't wait, nor does one after
    a trial that found a cost too high, as others may be as wrong."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._accounts: dict[int, _Account] = {}

    def rival(
        self,
        size: int,
        scores: Mapping[int, float],
        seconds: Mapping[int, float],
        judged: Mapping[int, bool],
    ) -> int | None:
        """Count a choice; return the number to try in place of the best one, or None. `scores`:
        tokens per second that each number seems to yield. `seconds`: expected seconds of a step of
        each. `judged`: whether measured costs are wrong, of the numbers whose timings tell it."""
        account = self._accounts.setdefault(size, _Account())
        account.saved += account.share * self._block
        account.wait -= 1
        account.judge(judged)
        best = max(scores, key=scores.__getitem__)
        account.tried.add(best)
        if not scores.keys() - account.tried:
            account.begin_round(best)
        others = scores.keys() - account.tried
        if account.wait > 0 or not others:
            return None
        nodes = max(others, key=scores.__getitem__)
        price = self._block * seconds[nodes] / seconds[best] * (1 - scores[nodes] / scores[best])
        if account.saved < price and not account.doubtful:
            return None
        account.tried.add(nodes)
        account.trial = nodes, price
        return nodes
