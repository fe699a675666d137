"""Texts that grow, the kernels that find n-grams in them, and the same by plain references."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tests.support.references.ngram_reference import (
    Candidates,
    Match,
    Reference,
    best_match,
    continuation,
    learned,
    observed,
)
from vllm_graft.spec_decode.kernels.ngram_insert import (
    HIGHEST,
    LOWEST,
    MEMORY,
    Learned,
    insert_ngrams,
    learn_rates,
)
from vllm_graft.spec_decode.kernels.ngram_match import match_ngrams
from vllm_graft.spec_decode.trees.text_state import BORDER, NgramState
from vllm_graft.spec_decode.trees.tree import CandidateTable, TreeShape, num_candidates

BEHIND = 3
"""Columns of a table behind those that n-grams may take."""


def learned_of(state: NgramState) -> Learned:
    """What is learned from a step, with counts that nobody reads."""
    counts = torch.zeros(2, dtype=torch.int64, device=state.rates.device)
    return Learned(state.pending, state.rates, counts, counts.clone())


def random_table(
    shape: TreeShape, levels: int, rows: int, vocab: int, rng: random.Random
) -> list[Candidates]:
    """Make candidates whose siblings differ and whose scores do not grow on the way down."""
    topk, width = shape.topk, num_candidates(shape.topk, shape.steps) + shape.num_nodes + BEHIND
    tables = []
    for _ in range(rows):
        scores: list[float] = []
        tokens: list[int] = []
        parents: list[int] = []
        frontier = [-1]
        for level in range(levels):
            for parent in frontier:
                tokens += rng.sample(range(vocab), topk)
                parents += [parent] * topk
                above = 0.0 if parent < 0 else scores[parent]
                scores += [above - rng.randrange(512) / 256 for _ in range(topk)]
            first = 0 if level == 0 else num_candidates(topk, level)
            frontier = rng.sample(range(first, len(tokens)), topk)
        rest = width - len(tokens)
        tables.append(Candidates(scores + [7.0] * rest, tokens + [8] * rest, parents + [9] * rest))
    return tables


@dataclass
class World:
    """Slots with texts, in both forms: the kernels' state, and lists."""

    min_n: int
    max_n: int
    shape: TreeShape
    vocab: int
    width: int
    max_reqs: int
    device: str
    seed: int
    reference: int = 0
    references: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    matches: dict[int, tuple[Match, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.state = NgramState.allocate(
            self.min_n, self.max_n, self.max_reqs, self.width, self.device, reference=self.reference
        )
        self.rates = self.state.rates.tolist()
        self.pending: dict[int, list[int]] = {}

    def add(self, slot: int, text: list[int], reference: Sequence[int] = ()) -> None:
        self.texts[slot] = text
        self.references[slot] = list(reference[: self.reference])
        if self.reference:
            self.state.refer(slot, reference)
        self.state.notes[slot] = 0
        self.matches.pop(slot, None)

    def pieces(self) -> list[int]:
        """A reference of random pieces, some of them empty, at times more than has room."""
        tokens: list[int] = []
        while len(tokens) < self.rng.randint(0, self.reference + 5):
            tokens += [self.rng.randrange(self.vocab) for _ in range(self.rng.randint(0, 12))]
            tokens.append(BORDER)
        return tokens[:-1]

    def _reference(self, slot: int) -> Reference:
        return Reference(self.width, self.references[slot])

    def emit(self, slot: int) -> None:
        """Let a text grow by what its match predicts, at times with an error, or by chance."""
        text, count = self.texts[slot], self.rng.randint(1, self.shape.num_nodes + 3)
        count = min(count, self.width - len(text))
        come = [self.rng.randrange(self.vocab) for _ in range(count)]
        if slot in self.matches and self.rng.random() < 0.7:
            start = self.matches[slot][0].start
            come = continuation(text, start, count, self._reference(slot))
            count = len(come)
            if come and self.rng.random() < 0.5:
                come[self.rng.randrange(count)] = self.rng.randrange(self.vocab)
        text += come

    def step(self, slots: list[int], levels: int, num_nodes: int) -> tuple[list[Candidates], ...]:
        """Run the kernels and the references over a batch; -1 is padding."""
        shape, rows = self.shape, len(slots)
        before = random_table(shape, levels, rows, self.vocab, self.rng)
        table = self._table(before)
        source = torch.full((self.max_reqs, self.width + 5), -9, dtype=torch.int32)
        total = torch.zeros(self.max_reqs, dtype=torch.int32)
        for slot, text in self.texts.items():
            source[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
            total[slot] = len(text)
        source, total = source.to(self.device), total.to(self.device)
        index = torch.tensor(slots, device=self.device)
        depth, first = min(shape.num_nodes, num_nodes), num_candidates(shape.topk, levels)
        match_ngrams(self.state, source, total, index, rows)
        # Whatever is read from now on must have been copied to the device.
        source.fill_(-9)
        insert_ngrams(
            table, self.state, total, index, rows,
            levels=levels, first=first, depth=depth, vocab_size=self.vocab,
        )  # fmt: skip
        expected = [Candidates(c.scores, c.tokens, c.parents) for c in before]
        for candidates, slot in zip(expected, slots, strict=True):
            path, rate = self._path(slot, depth)
            candidates.insert(path, rate, topk=shape.topk, levels=levels, first=first, depth=depth)
        self._learn()
        found = [each[:rows].tolist() for each in (table.scores, table.tokens, table.parents)]
        ours = [Candidates(*row) for row in zip(*found, strict=True)]
        return before, ours, expected

    def _table(self, rows: list[Candidates]) -> CandidateTable:
        shape, extra = self.shape, self.shape.num_nodes + BEHIND
        table = CandidateTable.allocate(
            self.max_reqs, shape.topk, shape.steps, self.device, extra=extra
        )
        for r, row in enumerate(rows):
            for tensor, values in zip(
                (table.scores, table.tokens, table.parents), (row.scores, row.tokens, row.parents)
            ):
                tensor[r] = torch.tensor(values, dtype=tensor.dtype)
        return table

    def _learn(self) -> None:
        learn_rates(learned_of(self.state))
        for n, (trials, hits) in self.pending.items():
            rate = learned(self.rates[n], trials, hits, MEMORY)
            self.rates[n] = min(max(rate, LOWEST), HIGHEST)
        self.pending = {}

    def _path(self, slot: int, depth: int) -> tuple[list[int], float]:
        """Look at what the slot's last match predicted; return what the next one predicts."""
        if slot < 0:
            return [], 1.0
        text = self.texts[slot]
        if slot in self.matches:
            match, before = self.matches[slot]
            trials, hits = observed(text, match, before, depth, self._reference(slot))
            entry = self.pending.setdefault(self._rate(match), [0, 0])
            entry[0] += trials
            entry[1] += hits
        found = best_match(text, self._reference(slot), self.min_n, self.max_n)
        self.matches.pop(slot, None)
        if found is None:
            return [], 1.0
        self.matches[slot] = found, len(text)
        path = continuation(text, found.start, depth, self._reference(slot))
        bad = [place for place, token in enumerate(path) if not 0 <= token < self.vocab]
        return path[: bad[0] if bad else depth], self.rates[self._rate(found)]

    def _rate(self, match: Match) -> int:
        return match.length + (self.state.lengths if match.start >= self.width else 0)
