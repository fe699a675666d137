"""How a head is trained on a target's distributions, and how often its drafts are accepted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from benchmarks.real_pair.head import Head
from benchmarks.real_pair.texts import Batch, Text, batches

DECAY = 0.9
"""Weight of a pass's loss over that of the pass before."""

ROWS = 4096
"""Rows whose logits over the target's whole vocabulary exist at a time."""


@dataclass(frozen=True)
class Run:
    """Settings of a training run, which lasts `seconds` or `steps`, whatever ends first."""

    device: torch.device
    seconds: float
    steps: int = 10**9
    tokens: int = 16384
    longest: int = 768
    passes: int = 6
    rate: float = 1e-3
    warm_up: float = 0.04
    seed: int = 0


@dataclass(frozen=True)
class Lesson:
    """What the target says about a batch.

    Attributes:
        aux: ``[texts, length - 2, layers * hidden]``, its states.
        embeds: ``[texts, length - 2, hidden]``, embeddings of the tokens after them.
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

    def __init__(self, model: LlamaForCausalLM, ids: Tensor, aux: Sequence[int]) -> None:
        self.model = model.eval().requires_grad_(False)
        self.device = next(model.parameters()).device
        self.ids, self.aux = ids.to(self.device), tuple(aux)
        self.places = torch.full((model.config.vocab_size,), -1, device=self.device)
        self.places[self.ids] = torch.arange(len(ids), device=self.device)

    @torch.no_grad()
    def lesson(self, batch: Batch) -> Lesson:
        """Run the target over a batch."""
        tokens, rows = batch.tokens.to(self.device), batch.counted.to(self.device)
        found = self.model.model(tokens, output_hidden_states=True, use_cache=False)
        aux = torch.cat([found.hidden_states[layer][:, :-2] for layer in self.aux], -1)
        embeds = self.model.get_input_embeddings()(tokens[:, 1:-1])
        wanted, best = [], []
        for states in found.last_hidden_state[:, 1:-1][rows].split(ROWS):
            logits = self.model.lm_head(states).float()
            total = logits.logsumexp(-1, keepdim=True)
            wanted.append((logits[:, self.ids] - total).exp().to(states.dtype))
            best.append(self.places[logits.argmax(-1)])
        return Lesson(aux.float(), embeds.float(), rows, torch.cat(wanted), torch.cat(best))


def frequent_tokens(texts: Sequence[Text], vocab: int, most: int) -> tuple[Tensor, float]:
    """The `most` most frequent tokens of texts, which ascend, and the share that they cover."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(text.tokens[text.prompt :].long(), minlength=vocab)
    ids = counts.topk(most).indices.sort().values
    return ids, (counts[ids].sum() / counts.sum().clamp(min=1)).item()


def begin_like_the_target(head: Head, model: LlamaForCausalLM, ids: Tensor) -> None:
    """Have a new head continue the target's last states by the target's own output layer."""
    hidden = head.sizes.hidden
    with torch.no_grad():
        head.lm_head.weight.copy_(model.lm_head.weight[ids.to(model.lm_head.weight.device)])
        head.norm.weight.copy_(model.model.norm.weight)
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -hidden:] += torch.eye(hidden, device=head.fc.weight.device)
        head.midlayer.self_attn.o_proj.weight.mul_(0.1)
        head.midlayer.mlp.down_proj.weight.mul_(0.1)


def loss(head: Head, lesson: Lesson, passes: int) -> Tensor:
    """Mean cross-entropy with the target's distribution, summed over passes."""
    total, wanted = torch.zeros((), device=lesson.aux.device), lesson.wanted.float()
    for number, states in enumerate(head(lesson.aux, lesson.embeds, passes)):
        logits = head.lm_head(states[lesson.rows]).float()
        total = total + DECAY**number * F.cross_entropy(logits, wanted)
    return total


def endless(texts: Sequence[Text], run: Run) -> Iterator[Batch]:
    """Batches round after round, each in another order."""
    for number in count():
        yield from batches(texts, run.tokens, run.longest, run.passes, run.seed + number)


def train(head: Head, teacher: Teacher, texts: Sequence[Text], run: Run) -> list[float]:
    """Train a head; return the loss of each step.

    The rate follows the clock: it rises, and falls to nothing when `run.seconds` are over.
    """
    torch.manual_seed(run.seed)
    head.train()
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    began, losses, seen = time.perf_counter(), [], 0
    on_gpu = run.device.type == "cuda"
    for number, batch in enumerate(endless(texts, run)):
        elapsed = time.perf_counter() - began
        share = max(elapsed / run.seconds, number / run.steps)
        if share >= 1:
            break
        rising = min(1.0, max(share, 1e-3) / run.warm_up)
        for group in optimizer.param_groups:
            group["lr"] = run.rate * rising * 0.5 * (1 + math.cos(math.pi * share))
        lesson = teacher.lesson(batch)
        with torch.autocast(run.device.type, torch.bfloat16, enabled=on_gpu):
            found = loss(head, lesson, run.passes)
        optimizer.zero_grad(set_to_none=True)
        found.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        losses.append(found.item())
        seen += batch.tokens.numel()
        if number % 50 == 0:
            print(f"{elapsed:5.0f} s, step {number}: {seen} tokens, loss {found:.3f}", flush=True)
    head.eval()
    return losses


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
                logits = head.lm_head(states[lesson.rows]).float()
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
