"""What a target says about batches of texts, of which a head learns."""

import random
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_graft.train import states
from vllm_graft.train.output_layers import LOGITS, OutputLayers
from vllm_graft.train.states import Entry
from vllm_graft.train.target import Target

AHEAD = 3
"""Batches that are read while others are learned."""

Batch = tuple[Entry, ...]
"""Texts that are learned side by side."""


@dataclass(frozen=True)
class Lesson:
    """What the target says about a batch.

    Attributes:
        aux: ``[texts, places, layers * hidden]``, its states.
        embeds: ``[texts, places, hidden]``, rows of the embedding of the tokens after them.
        rows: bool ``[texts, places]``; the places that count.
        wanted: ``[rows, draft_vocab]``, probabilities of the token to draft; they sum up to less
            than 1 where the head can't draft all tokens.
        best: int64 ``[rows]``, the likeliest token, an index of the draft's vocabulary or -1.
    """

    aux: Tensor
    embeds: Tensor
    rows: Tensor
    wanted: Tensor
    best: Tensor


def batches(entries: Sequence[Entry], most: int, seed: int) -> list[Batch]:
    """Batches of up to `most` tokens with padding, in random order; like lengths share one."""
    order = random.Random(seed)
    shuffled = list(entries)
    order.shuffle(shuffled)
    # The lengths are sorted within parts, so that a batch isn't the same in each round.
    longest = max(entry.tokens for entry in entries)
    part = max(1, 32 * most // longest)
    groups: list[Batch] = []
    for start in range(0, len(shuffled), part):
        group: list[Entry] = []
        for entry in sorted(shuffled[start : start + part], key=lambda each: each.tokens):
            if group and (len(group) + 1) * entry.tokens > most:
                groups.append(tuple(group))
                group = []
            group.append(entry)
        groups.append(tuple(group))
    order.shuffle(groups)
    return groups


def endless(entries: Sequence[Entry], most: int, seed: int, ranks: int) -> Iterator[list[Batch]]:
    """A batch for each rank, round after round, each in another order."""
    for number in count():
        found = batches(entries, most, seed + number)
        # All ranks end a round together; a few texts at its end wait for the next one.
        whole = len(found) // ranks * ranks
        found = found[:whole] or [found[rank % len(found)] for rank in range(ranks)]
        yield from (found[start : start + ranks] for start in range(0, len(found), ranks))


def counted(entry: Entry, passes: int) -> slice:
    """Places of a text that count: the token two places after is of an answer. What comes within
    the first `passes` tokens is not counted, as a pass reads so many before."""
    return slice(max(entry.prompt - 2, passes - 1), entry.tokens - 1)


def useful(entries: Sequence[Entry], passes: int) -> list[Entry]:
    """Texts of which at least one place counts."""
    return [each for each in entries if range(each.tokens)[counted(each, passes)]]


class Lessons:
    """Makes lessons of batches. `ids`: int64 ``[draft_vocab]``, the tokens that the head can draft,
    which ascend."""

    def __init__(
        self, target: Target, layers: OutputLayers, folder: Path, ids: Tensor, passes: int
    ) -> None:
        self.target, self.layers, self.folder, self.passes = target, layers, folder, passes
        self.device = layers.embedding.device
        self.ids = ids.to(self.device)
        self.places = torch.full((target.vocab,), -1, device=self.device)
        self.places[self.ids] = torch.arange(len(ids), device=self.device)

    def each(self, given: Iterator[Batch]) -> Generator[Lesson, None, None]:
        """Lessons of batches; files are read ahead."""
        with ThreadPoolExecutor(AHEAD) as readers:
            ahead = [readers.submit(self.read, batch) for batch in islice(given, AHEAD)]
            while ahead:
                found = ahead.pop(0).result()
                ahead += [readers.submit(self.read, batch) for batch in islice(given, 1)]
                yield self.lesson(*found)

    def read(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """States ``[texts, length, layers, hidden]``, tokens ``[texts, length]``, and which of
        ``length - 1`` places count; texts are padded at their ends."""
        width = max(entry.tokens for entry in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        rows = torch.zeros(len(batch), width - 1, dtype=torch.bool)
        taken: Tensor | None = None
        for row, entry in enumerate(batch):
            found, ids = states.load(self.folder, entry)
            if taken is None:
                taken = torch.zeros(len(batch), width, *found.shape[1:], dtype=found.dtype)
            taken[row, : len(ids)], tokens[row, : len(ids)] = found, ids
            rows[row, counted(entry, self.passes)] = True
        assert taken is not None
        return taken, tokens, rows

    @torch.no_grad()
    def lesson(self, taken: Tensor, tokens: Tensor, rows: Tensor) -> Lesson:
        taken, tokens, rows = (each.to(self.device) for each in (taken, tokens, rows))
        at = self.target.taken.index
        aux = torch.cat([taken[:, :-1, at(layer)] for layer in self.target.aux], -1)
        embeds = F.embedding(tokens[:, 1:], self.layers.embedding)
        last = taken[:, 1:, at(self.target.layers)][rows]
        parts = [self._wanted(each) for each in last.split(max(1, LOGITS // self.target.vocab))]
        wanted, best = (torch.cat(each) for each in zip(*parts, strict=True))
        return Lesson(aux.float(), embeds.float(), rows, wanted, best)

    def _wanted(self, last: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities of the tokens to draft, and the likeliest, of states ``[rows, hidden]``."""
        logits = self.layers.logits(last)
        total = logits.logsumexp(-1, keepdim=True)
        wanted = (logits[:, self.ids] - total).exp().to(self.layers.output.dtype)
        return wanted, self.places[logits.argmax(-1)]


def token_counts(folder: Path, entries: Sequence[Entry], vocab: int) -> Tensor:
    """How often answers have each token, int64 ``[vocab]``."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for entry in entries:
        counts += torch.bincount(states.tokens(folder, entry)[entry.prompt :], minlength=vocab)
    return counts


def frequent_tokens(counts: Tensor, most: int) -> Tensor:
    """The `most` most frequent tokens, which ascend."""
    # Where counts are equal, the first ids: tokenizers number their merges by frequency.
    return counts.argsort(descending=True, stable=True)[:most].sort().values
