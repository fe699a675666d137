"""What drafting from hot tokens gains, and how many of a text's tokens they must hold for it."""

from __future__ import annotations

from vllm_graft.spec_decode.heads.hot_vocabulary import COVERAGE
from vllm_graft.spec_decode.tuning.step_times import Costs

LOST = 2.5
"""Part of a step's tokens that is lost per part of the text's tokens that the hot ones lack.

Where a node's right child is none of them, the path ends there. A path of up to 4 drafts, each of
which is accepted with the chance of 0.75 or 0.85, gets shorter by 1.4 or 1.7 times what is lacking,
one of up to 12 by 2.7 or 3.7 times, if such tokens are drafted as well as others are; they are rare
ones, which are guessed less often.
"""


class HotGains:
    """Compares steps that draft from the whole vocabulary with steps that draft from hot tokens.

    Args:
        whole: seconds of a step by nodes and by requests, with the whole vocabulary.
        hot: likewise, with hot tokens. Numbers of nodes that are missing, gain nothing.
    """

    def __init__(self, whole: Costs, hot: Costs) -> None:
        self._whole, self._hot = whole, hot

    def gain(self, nodes: int, num_reqs: int) -> float:
        """Part of a step that hot tokens save: that of the next larger measured batch."""
        measured = self._hot.get(nodes)
        if not measured:
            return 0.0
        count = min((each for each in measured if each >= num_reqs), default=max(measured))
        return 1.0 - measured[count] / self._whole[nodes][count]

    def least(self, nodes: int, num_reqs: int) -> float:
        """The part of a text's tokens that hot tokens must hold to gain more than they lose."""
        return 1.0 - self.gain(nodes, num_reqs) / LOST

    def expected(self) -> Costs:
        """What steps cost with what they are expected to draft from.

        Learned tokens are expected to hold `COVERAGE` of a text.
        """
        costs = {nodes: dict(counts) for nodes, counts in self._whole.items()}
        for nodes, counts in self._hot.items():
            costs[nodes] |= {
                count: seconds
                for count, seconds in counts.items()
                if self.least(nodes, count) < COVERAGE
            }
        return costs
