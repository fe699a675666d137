"""How a head is trained on a target's distributions, and how often its drafts are accepted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.real_pair.descent import Run, descend
from benchmarks.real_pair.head import Head
from benchmarks.real_pair.texts import Batch, Text, batches

DECAY = 0.9
"""Weight of a pass's loss over that of the pass before."""

LOGITS = 2**27
"""Most logits over the target's whole vocabulary that exist at a time."""


@dataclass(frozen=True)
class Lesson:
    """What the target says about a batch.

    Attributes:
        aux: ``[texts, length - 2, layers * hidden]``, its states.
        embeds: ``[texts, length - 2, hidden]``, rows of the embedding of the tokens after them.
        rows: bool ``[texts, length - 2]``; the places that count.
        wanted: ``[rows, draft_vocab]``, probabilities of the token to draft; they sum up to less
            than 1 where the head can't draft all tokens.
        best: int64 ``[rows]``, the likeliest token, an index of the draft's vocabulary or -1.
    """

    aux: Tensor
    embeds: Tensor
    rows: Tensor
    wanted: Tensor
    best: Tensor


class Teacher:
    """The target, which does not change.

    Args:
        model: in the precision that it is served in.
        ids: int64 ``[draft_vocab]``, the tokens that the head can draft, which ascend.
        aux: layers whose inputs the head reads.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor, aux: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.ids, self.aux = ids.to(self.device), tuple(aux)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.outputs: Tensor = model.get_output_embeddings().weight
        self.places = torch.full((model.config.vocab_size,), -1, device=self.device)
        self.places[self.ids] = torch.arange(len(ids), device=self.device)

    @torch.no_grad()
    def lesson(self, batch: Batch) -> Lesson:
        """Run the target over a batch."""
        tokens, rows = batch.tokens.to(self.device), batch.counted.to(self.device)
        found = self.model.base_model(tokens, output_hidden_states=True, use_cache=False)
        aux = torch.cat([found.hidden_states[layer][:, :-2] for layer in self.aux], -1)
        embeds = F.embedding(tokens[:, 1:-1], self.embedding)
        last = found.last_hidden_state[:, 1:-1][rows]
        parts = [self._wanted(states) for states in last.split(max(1, LOGITS // len(self.outputs)))]
        wanted, best = (torch.cat(each) for each in zip(*parts, strict=True))
        return Lesson(aux.float(), embeds.float(), rows, wanted, best)

    def _wanted(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities of the tokens to draft, and the likeliest, of states ``[rows, hidden]``."""
        logits = F.linear(states, self.outputs).float()
        best = self.places[logits.argmax(-1)]
        total = logits.logsumexp(-1, keepdim=True)
        return (logits[:, self.ids] - total).exp().to(states.dtype), best


def frequent_tokens(texts: Sequence[Text], vocab: int, most: int) -> tuple[Tensor, float]:
    """The `most` most frequent tokens of texts, which ascend, and the share that they cover."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.tokens[text.prompt :].long(), minlength=vocab)
    ids = counts.topk(most).indices.sort().values
    return ids, (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def begin_like_the_target(head: Head, model: PreTrainedModel, ids: Tensor) -> None:
    """Have a new head continue the target's last states by the target's own output layer."""
    hidden = head.sizes.hidden
    with torch.no_grad():
        outputs = model.get_output_embeddings().weight
        head.lm_head.weight.copy_(outputs[ids.to(outputs.device)])
        head.norm.weight.copy_(model.base_model.norm.weight)
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden:] += torch.eye(hidden, device=head.fc.weight.device)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)


def loss(head: Head, lesson: Lesson, passes: int) -> Tensor:
    """Mean cross-entropy with the target's distribution, summed over passes."""
    total, wanted = torch.zeros((), device=lesson.aux.device), lesson.wanted.float()
    for number, states in enumerate(head(lesson.aux, lesson.embeds, passes)):
        found = F.cross_entropy(head.logits(states[lesson.rows]).float(), wanted)
        total = total + DECAY**number * found
    return total


def endless(texts: Sequence[Text], run: Run) -> Iterator[Batch]:
    """Batches round after round, each in another order."""
    for number in count():
        order = run.seed + number + 10_000 * run.rank
        yield from batches(texts, run.tokens, run.longest, run.passes, order)


def lessons(teacher: Teacher, texts: Sequence[Text], run: Run) -> Iterator[Lesson]:
    """Lessons without an end; only as many as the target read in time where that is limited."""
    if not run.reading:
        yield from map(teacher.lesson, endless(texts, run))
        return
    read: list[Lesson] = []
    began = time.perf_counter()
    for batch in batches(texts, run.tokens, run.longest, run.passes, run.seed):
        read.append(teacher.lesson(batch))
        if time.perf_counter() - began > run.reading:
            break
    rows = sum(len(lesson.best) for lesson in read)
    print(
        f"{time.perf_counter() - began:5.0f} s: read {len(read)} batches, {rows} rows", flush=True
    )
    yield from cycle(read)


def train(head: Head, teacher: Teacher, texts: Sequence[Text], run: Run) -> list[float]:
    """Train a head; return the loss of each step."""
    seen = 0

    def loss_of(lesson: Lesson) -> Tensor:
        nonlocal seen
        seen += lesson.rows.numel()
        return loss(head, lesson, run.passes)

    return descend(
        head, lessons(teacher, texts, run), loss_of, run, told=lambda: f"{seen} tokens, "
    )


@dataclass(frozen=True)
class Acceptance:
    """How a head does by depth, on texts that it has not seen; depth 1 is the first draft.

    Attributes:
        agree: share of the target's likeliest tokens that are the draft's too, where all earlier
            drafts of the chain agreed.
        overlap: mean of sum(min(p, q)) over places, which is how often a sampled draft is accepted.
        length: mean acceptance length of a greedy chain over all depths, with the bonus token.
        rows: places that were looked at.
    """

    agree: list[float]
    overlap: list[float]
    length: float
    rows: int


@torch.no_grad()
def acceptance(head: Head, teacher: Teacher, texts: Sequence[Text], run: Run) -> Acceptance:
    """Compare a head with the target on texts of which each token was the target's own."""
    passes = run.passes
    same, asked, shared = ([0.0] * passes for _ in range(3))
    rows = 0
    for batch in batches(texts, run.tokens, run.longest, passes, run.seed):
        lesson = teacher.lesson(batch)
        rows += len(lesson.best)
        # Whether the draft agreed so far, for a chain that began so many places earlier.
        before = torch.ones_like(lesson.rows)
        on_gpu = run.device.type == "cuda"
        with torch.autocast(run.device.type, torch.bfloat16, enabled=on_gpu):
            found = head(lesson.aux, lesson.embeds, passes)
            for number, states in enumerate(found):
                logits = head.logits(states[lesson.rows]).float()
                agree = logits.argmax(-1) == lesson.best
                live = before[lesson.rows]
                same[number] += (agree & live).sum().item()
                asked[number] += live.sum().item()
                drawn = torch.minimum(logits.softmax(-1), lesson.wanted.float())
                shared[number] += drawn.sum().item()
                held = torch.zeros_like(before)
                held[lesson.rows] = agree & live
                before = F.pad(held[:, :-1], (1, 0))
    agreed = [part / max(1.0, whole) for part, whole in zip(same, asked, strict=True)]
    length = 1 + sum(math.prod(agreed[: depth + 1]) for depth in range(passes))
    return Acceptance(
        [round(each, 4) for each in agreed],
        [round(each / max(1, rows), 4) for each in shared],
        round(length, 3),
        rows,
    )
