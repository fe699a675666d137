"""The number of nodes that pays: learned while serving, from times of steps and tokens."""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_graft.spec_decode.tuning.acceptance import Acceptance
from vllm_graft.spec_decode.tuning.step_times import FEW, Costs, StepTimes
from vllm_graft.spec_decode.tuning.trials import Trials

BLOCK = 6
"""Steps for which a choice is kept. The first of them can't be timed. Raised, more of them are
timed, and a trial takes longer."""

BLOCKS = 4
"""Blocks that drafts without a model take from one choice to the next at most, once it is the same
again. What they lose ends them sooner. Raised, the host chooses less often."""

LOSS = 0.005
"""Part of a step that each step without drafts saves for trying some: the text may have changed.
Raised, texts without drafts take longer, and drafts that begin to pay are found sooner."""

TRIAL = 1.0
"""Steps that are saved for a trial at most. What it loses beyond them is saved afterwards. Raised,
dear drafts are tried more seldom."""

MOST = 4.0
"""Steps that drafts win ahead at most. Raised, drafts that pay seldom rest less, and texts that
have just become hopeless take longer."""

DEAR = 4.0
"""Blocks that are saved for what a number of nodes costs more than the cheapest one, before drafts
that go on take it. Raised, numbers are chosen by what they cost rather than by hopes."""

LIKELY = 0.75
"""Part of the best score from which on a number is tried that was never timed. Raised, the time of
fewer numbers is known where texts seldom repeat themselves."""

AGAIN = 100
"""Choices between two tries to time steps without drafts. Raised, a machine whose batches change
before it succeeds takes less time for it."""

COPIED = 6
"""Tokens at a text's end that stood in it before, for which drafts end a rest. Drafts that lose
then double it. Raised, copies are noticed later, and phrases that come twice cost less."""

DEAF = 16
"""Steps, for each of these tokens, in which no copy ends a rest after drafts that one had asked for
have lost. Raised, a few requests that copy in a large batch cost the others less."""

MOST_COPIED = 48
"""Most tokens that are wanted. Raised, texts that mislead often cost less."""

STEADY = 8
"""Steps in a row of one batch size before their times are recorded, where costs were measured.
Raised, work that is done once disturbs less, and batches that drift are timed less often."""

UNKNOWN_RATIO = 1.1
"""Time of a step with drafts over one without, until timed. Raised, useless drafts rest sooner."""

_WINDOW = 64
"""Steps over which a batch size's averages go. Raised, prompts that have ended are felt longer."""


@dataclass
class _BatchHistory:
    """Recent steps of one batch size, and the choice that is in use for it. Means weigh recent
    steps most, and go over `steps` of them; `context` is of the latest."""

    steps: float = 0.0
    prompt_fraction: float = 0.0
    tokens: float = 1.0
    prompt_rows: deque[int] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    quiet: int = 0
    context: int = 0
    choice: int | None = None
    steps_left: int = 0
    until_plain: int = 0
    ratios: dict[int, float] = field(default_factory=dict)
    least_ratio: float = 1.0
    blocks: int = 1

    @property
    def prompts(self) -> list[int]:
        """Rows of prompts of the recent steps that had some, ascending."""
        return sorted(filter(None, self.prompt_rows))

    def add(self, tokens: float, prompt_rows: int, context: int) -> None:
        self.context = context
        if self.steps < _WINDOW:
            self.steps += 1
        has_prompts = 1.0 if prompt_rows > 0 else 0.0
        self.prompt_fraction += (has_prompts - self.prompt_fraction) / self.steps
        self.tokens += (tokens - self.tokens) / self.steps
        self.prompt_rows.append(prompt_rows)
        self.quiet = 0 if prompt_rows > 0 else self.quiet + 1
        if self.quiet >= _WINDOW:
            self.prompt_fraction = 0.0


class NodeTuner:
    """Chooses the number of nodes that yields the most tokens per second.

    A number's score is the upper estimate of its `Acceptance` length, which all batch sizes share,
    over the mean of its `StepTimes`, so that what may be better is tried. One whose time is unknown
    is tried, too, unless it could not be the best even in the time that it takes in a smaller
    batch. Costs of the start may be wrong, so now and then another number is tried (see `Trials`).

    No drafts tell nothing of a text that may have changed. So steps without drafts save a part of a
    step each (`LOSS`); drafts are tried when this pays for a block that yields nothing. What drafts
    lose is taken from it, and what they win is added, up to `MOST`. With `rests` no others are
    drafted at all: estimates of acceptance are hopeful, and most texts have nothing to draft; a
    text that is seen to copy itself ends such a rest (`heed`). All of that rests on what a step
    takes without drafts, which leaves the host less to do than its cost tells. So such steps are
    timed first, where they might be the better ones.

    Args:
        schedule: nodes by number of requests in the batch, index 0 not used; its distinct values
            are the numbers to choose from.
        max_rows: rows, root and nodes of all requests, that a step may verify. Where not even the
            smallest number of nodes fits, that one is chosen.
        sizes: numbers of requests, ascending, each for batches up to it; None means powers of two.
        levels: levels of the trees of each number of nodes; as many as nodes where it has none.
        cuts: whether trees beside prompts are cut where the step fits no graph (see `graph_fit`).
        experts: whether rows of a step read experts, so that costs are corrected by a slope.
        rests: whether drafts rest that are not saved for: those without a model.
    """

    def __init__(
        self, schedule: list[int], max_rows: int, sizes: Sequence[int] | None = None,
        levels: Mapping[int, int] | None = None,
        *, cuts: bool = False, experts: bool = False, rests: bool = False,
    ) -> None:  # fmt: skip
        self._schedule = schedule
        self._rests = rests and 0 in schedule[1:]
        self._saved = self._grant = TRIAL
        self._won = 0.0
        self._copied, self._heeded, self._deaf = COPIED, False, 0
        self._cuts = cuts
        self._max_rows = max_rows
        sizes = sizes or [1 << power for power in range(len(schedule).bit_length())]
        # The size of each number of requests.
        self._sizes = [sizes[bisect_left(sizes, batch)] for batch in range(sizes[-1] + 1)]
        self._node_counts = sorted(set(schedule[1:]))
        self._acceptance = Acceptance({n: (levels or {}).get(n, n) for n in self._node_counts})
        self.times = StepTimes(experts=experts, plain_apart=self._rests)
        self._trials = Trials(BLOCK)
        self._batches: defaultdict[int, _BatchHistory] = defaultdict(_BatchHistory)
        # Kept, as a small target's steps are as long as the host's work: acceptance lengths by
        # number of nodes, and numbers of nodes by requests.
        self._lengths: dict[int, float] = {}
        self._fitting: dict[int, list[int]] = {}
        self._last_size = 0
        self._steps_of_size = 0

    def seed(self, costs: Costs) -> None:
        self.times.seed(costs)

    @property
    def costs(self) -> Costs:
        """The costs measured at the start."""
        return self.times.costs

    def knows(self, nodes: int) -> bool:
        """Whether `nodes` is a number that may be chosen, or 0, which any step may verify."""
        return not nodes or nodes in self._node_counts

    def allowed(self, batch: int) -> list[int]:
        """Numbers of nodes to choose from for a batch of `batch` requests, smallest first."""
        if batch not in self._fitting:
            fitting = [nodes for nodes in self._node_counts if fits(batch, nodes, self._max_rows)]
            self._fitting[batch] = fitting or self._node_counts[:1]
        return self._fitting[batch]

    @property
    def copied(self) -> int:
        """Tokens at a text's end that end the rest of drafts if they stood in it before; 0 where
        none rest, or copies have misled."""
        listens = self._rests and self._saved < TRIAL and not self._deaf
        return self._copied if listens else 0

    def heed(self, copied: int) -> None:
        """Try drafts again if so many tokens at the end of a text stood in it before."""
        if not 0 < self.copied <= copied:
            return
        self._saved, self._heeded = TRIAL, True
        for history in self._batches.values():
            history.steps_left = 0 if history.choice == 0 else history.steps_left

    def begin_step(self, batch: int) -> int:
        """Begin a step of `batch` requests; return the nodes that it drafts for each of them. This
        is no mere question: a choice lasts `BLOCK` steps, and each call uses up one of them."""
        size = self._size(batch)
        history = self._batches[size]
        allowed = self.allowed(batch)
        if history.steps_left <= 0 and self._goes_on_resting(history):
            history.steps_left = BLOCK
        if history.choice not in allowed or history.steps_left <= 0:
            captured, before = self._captured(history, allowed, batch), history.choice
            history.choice = self._best(size, captured, batch)
            same = self._rests and history.choice == before != 0
            history.blocks = min(history.blocks + 1, BLOCKS) if same else 1
            history.steps_left = history.blocks * BLOCK
        history.steps_left -= 1
        return history.choice

    def observe(
        self, nodes: int, emitted: list[int], seconds: float | None,
        *, batch: int | None = None, prompts: int = 0, verified: int | None = None,
        same: bool = True, temperature: float = 0.0, context: int = 0,
    ) -> None:  # fmt: skip
        """Learn from a step in which every decoding request had `nodes` drafts.

        Args:
            emitted: tokens that each emitted.
            seconds: time of the step; None, or one that isn't positive, says nothing.
            batch: requests in the step, if others ran besides those that decode.
            prompts: rows of prompts, or of parts of prompts, that ran besides.
            verified: how many of its drafts each verified; None if all of them. A cut tree tells no
                acceptance, but its time counts, as all steps beside such prompts are cut.
            same: whether most of the decoding requests were in the decoding step before.
            temperature: their mean temperature.
            context: K/V tokens of all requests of the step.
        """
        size = self._size(batch or len(emitted))
        alike = size == self._last_size
        self._last_size = size
        self._steps_of_size = self._steps_of_size + 1 if alike else 0
        whole = verified is None or verified == nodes
        if whole:
            self._lengths.clear()
            self._acceptance.observe(
                nodes, emitted, alike=alike, same=same, temperature=temperature
            )
        history = self._batches[size]
        tokens = sum(emitted) / max(1, len(emitted))
        history.add(tokens, prompts, context)
        self._deaf = self._deaf - 1 if self._deaf and same else 0
        if not same:
            self._grant_again()
            history.steps_left = history.steps_left if nodes else 0
        elif not nodes:
            if self._saved < TRIAL:
                self._saved = min(self._saved + LOSS, TRIAL)
        elif whole:
            ratio = history.ratios.get(nodes, UNKNOWN_RATIO)
            won, least = tokens - ratio, 0.0
            self._won += won
            self._saved = min(self._saved + won, MOST if self._rests else TRIAL)
            if self._saved >= MOST:
                self._copied, self._heeded = COPIED, False
            if self._saved <= 0 and self._rests:
                history.steps_left = 0
                if self._heeded:
                    self._copied, self._heeded = min(2 * self._copied, MOST_COPIED), False
                    self._deaf = DEAF * self._copied
                # What a trial costs beyond `TRIAL` is saved afterwards. Steps are chosen ahead, so
                # that it takes more than a block.
                least = min(TRIAL - 2 * BLOCK * (ratio - 1), 0.0)
            self._saved = max(self._saved, least)
        if seconds is None or seconds <= 0:
            return
        measured = self.times.measured(size, nodes)
        if measured is not None and self._steps_of_size < STEADY:
            # A new batch size comes with work that is done once.
            return
        self.times.observe(size, nodes, seconds, context, prompts=bool(prompts))

    def _grant_again(self) -> None:
        """Save steps for drafts of other requests. They may repeat themselves like those before."""
        if self._rests and self._won < 0:
            self._grant /= 2
        elif self._rests and self._won > 0:
            self._grant = min(max(2 * self._grant, TRIAL), MOST)
        self._won, self._saved = 0.0, max(min(self._saved, TRIAL), self._grant)

    def _captured(self, history: _BatchHistory, allowed: list[int], batch: int) -> list[int]:
        """Drop the node counts for which most steps would no longer fit a captured graph. How long
        a step takes without one is known only by a long trial, as the host launches it piece by
        piece. Steps that fit no graph even with the smallest number do not count."""
        if not (prompts := history.prompts):
            return allowed

        def fitting(nodes: int, prompt_fraction: float) -> float:
            """Fraction of steps that fit a graph, if `prompt_fraction` of them contain prompts."""
            found = bisect_right(prompts, self._max_rows - batch * (1 if self._cuts else nodes + 1))
            return 1.0 - prompt_fraction + prompt_fraction * found / len(prompts)

        kept = []
        for nodes in allowed:
            prompt_fraction = self._prompt_fraction(history, nodes)
            if 2 * fitting(nodes, prompt_fraction) >= fitting(allowed[0], prompt_fraction):
                kept.append(nodes)
        return kept

    def _best(self, size: int, allowed: list[int], batch: int) -> int:
        """The number of nodes with the best score, or one whose time is still unknown."""
        times, added = self._seconds(size, allowed)
        history = self._batches[size]
        history.ratios = {nodes: times[nodes] / times[0] for nodes in times if 0 in times}
        history.least_ratio = min((history.ratios[n] for n in history.ratios if n), default=1.0)
        affordable = [nodes for nodes in allowed if nodes and self._affordable(history, nodes)]
        if self._rests:
            allowed = affordable or [0]
        tokens = {nodes: self._tokens_per_step(size, nodes, batch) for nodes in allowed}
        if self._rests and affordable and self._doubts_rest(history, size, tokens, times):
            return 0
        scores = {nodes: tokens[nodes] / times[nodes] for nodes in allowed if nodes in times}
        best = max(scores.values(), default=0.0)
        unknown = [
            nodes
            for nodes in allowed
            if nodes not in scores
            and tokens[nodes] > best * (self.times.least(size, nodes, history.context) + added)
        ]
        if unknown:
            start = self._schedule[min(batch, len(self._schedule) - 1)]
            return min(unknown, key=lambda nodes: (abs(nodes - start), nodes))
        choice = max(scores, key=scores.__getitem__)
        if self._rests and not history.choice:
            # A trial that ends a rest tells another number's time, too.
            likely = (nodes for nodes in scores if scores[nodes] >= LIKELY * scores[choice])
            choice = next((n for n in likely if self.times.timings(size, n) < FEW), choice)
            if choice:
                return choice
        if not choice and (tried := [nodes for nodes in affordable if nodes in scores]):
            return min(tried, key=times.__getitem__)
        rival = None
        if self.costs:
            rival = self._trials.rival(size, scores, times, self.times.judged(size))
        return choice if rival is None else rival

    def _goes_on_resting(self, history: _BatchHistory) -> bool:
        """Whether not even the cheapest drafts are saved for, as far as is known: a step of a rest
        takes as little of the host's time as may be."""
        if not self._rests or history.choice != 0 or len(history.ratios) < 2:
            return False
        return self._saved < min(BLOCK * (history.least_ratio - 1), TRIAL)

    def _doubts_rest(
        self,
        history: _BatchHistory,
        size: int,
        tokens: Mapping[int, float],
        times: Mapping[int, float],
    ) -> bool:
        """Whether a step without drafts may be the better one, as nobody knows how long it takes
        beyond its measured cost: it leaves the host less to do."""
        history.until_plain -= 1
        least = self.times.measured(size, 0) or 0.0
        if (
            history.until_plain > 0
            or self._steps_of_size < STEADY
            or self.times.timings(size, 0) >= FEW
            or any(tokens[n] * least > times[n] for n in tokens if n in times)
        ):
            return False
        history.until_plain = AGAIN
        return True

    def _affordable(self, history: _BatchHistory, nodes: int) -> bool:
        """Whether a block of drafts that yield nothing is saved for, or as much as ever is. Drafts
        that were begun go on until all is spent."""
        ratio = history.ratios.get(nodes, UNKNOWN_RATIO)
        if not history.choice or not self._rests:
            return self._saved >= min(BLOCK * (ratio - 1), TRIAL)
        dear = DEAR * BLOCK * (ratio - history.least_ratio)
        return self._saved > 0 and self._saved >= min(dear, TRIAL)

    def _seconds(self, size: int, allowed: list[int]) -> tuple[dict[int, float], float]:
        """Expected seconds of a step per known node count, and the part that prompts cause."""
        history, found = self._batches[size], dict[int, float]()
        alone = {n: self.times.predict(size, n, history.context) for n in allowed}
        added, fastest = self.times.added(size), min(filter(None, alone.values()), default=None)
        for nodes, less in alone.items():
            fraction = self._prompt_fraction(history, nodes)
            if less is not None and not fraction:
                found[nodes] = less
                continue
            more = self.times.predict(size, nodes, history.context, prompts=True)
            if more is not None:
                # If only steps with prompts were timed, to guess the others is better than to wait.
                less = max(more - added, fastest or more) if less is None else less
                found[nodes] = less + fraction * (more - less)
        return found, history.prompt_fraction * added

    def _prompt_fraction(self, history: _BatchHistory, nodes: int) -> float:
        """The fraction of steps that would contain a prompt, with so many nodes: a request that
        ends makes room for another one, so prompts come at a constant rate per token."""
        fraction = history.prompt_fraction
        return min(1.0, fraction * self._tokens(nodes) / history.tokens) if fraction else 0.0

    def _tokens(self, nodes: int) -> float:
        """Upper estimate of the acceptance length, kept until more is observed."""
        if nodes not in self._lengths:
            self._lengths[nodes] = 1.0 + self._acceptance.upper(nodes)
        return self._lengths[nodes]

    def _tokens_per_step(self, size: int, nodes: int, batch: int) -> float:
        """Upper estimate of a request's mean tokens per step, steps of cut trees among them."""
        whole, history = self._tokens(nodes), self._batches[size]
        kept = self._kept(history, nodes, batch)
        if kept == nodes:
            return whole
        return whole - self._prompt_fraction(history, nodes) * (whole - self._tokens_of_cut(kept))

    def _kept(self, history: _BatchHistory, nodes: int, batch: int) -> int:
        """Nodes that the trees keep beside a prompt of the usual length."""
        if not self._cuts or not (prompts := history.prompts):
            return nodes
        room = self._max_rows - prompts[len(prompts) // 2] - batch
        # Where not even the roots fit, nothing is cut.
        return min(nodes, room // batch) if room >= 0 else nodes

    def _tokens_of_cut(self, nodes: int) -> float:
        """Upper estimate for a number of nodes without a tree: on the line between its neighbours,
        or between one token and the first of them."""
        place = bisect_left(self._node_counts, nodes)
        above = self._node_counts[place]
        below = self._node_counts[place - 1] if place else 0
        least = self._tokens(below) if below else 1.0
        if above == below:
            return least
        return least + (nodes - below) / (above - below) * (self._tokens(above) - least)

    def _size(self, batch: int) -> int:
        return self._sizes[min(batch, len(self._sizes) - 1)]

    def expected(self, batch: int) -> dict[int, dict[str, float]]:
        """Expectations of a step of `batch` requests, for each number of nodes to choose from.
        ``expected_length`` is the upper estimate of a request's tokens; ``expected_ms``, and
        ``measured_ms`` at the start, are there where known."""
        size = self._size(batch)
        allowed, found = self.allowed(batch), {}
        seconds, _ = self._seconds(size, allowed)
        for nodes in allowed:
            known = {
                "expected_ms": seconds.get(nodes),
                "measured_ms": self.times.measured(size, nodes),
            }
            found[nodes] = {"expected_length": round(self._tokens_per_step(size, nodes, batch), 3)}
            found[nodes] |= {name: round(1e3 * s, 3) for name, s in known.items() if s is not None}
        return found


def fits(batch: int, nodes: int, max_rows: int) -> bool:
    """Whether `batch` requests may verify `nodes` drafts each within `max_rows` rows."""
    return nodes == 0 or batch * (nodes + 1) <= max_rows
