"""Answers that an engine is made to say: all passes run as ever, only the draws are given.

Wherever the target draws, the answer's token has by far the largest logit. A small target can't
follow instructions, and the draft proposes what it would for a text of somebody who can.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

CERTAIN = 1e4
"""A logit that leaves all other tokens no chance, and that bfloat16 can hold."""


class Replay:
    """Lets a worker draw given answers, whatever samples and verifies its tokens.

    Args:
        answers: token ids of the answer to each prompt, by the prompt's token ids.
        max_reqs: request-state slots.
        width: most tokens of a text.
        device: where tokens are drawn.
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        max_reqs: int,
        width: int,
        device: torch.device,
    ) -> None:
        self.answers = answers
        self.texts = torch.full((max_reqs, width + 1), -1, dtype=torch.int64, device=device)

    def add(self, slot: int, prompt: Sequence[int]) -> None:
        """Note a new request's answer; behind its end the target's own draws stay.

        That is at once where the answer is empty.

        Raises:
            RuntimeError: if the prompt is not one of the given ones.
        """
        answer = self.answers.get(tuple(prompt))
        if answer is None:
            raise RuntimeError(f"no answer to replay for a prompt of {len(prompt)} tokens")
        end = min(len(prompt) + len(answer), self.texts.shape[1])
        text = torch.tensor(answer[: end - len(prompt)])
        self.texts[slot].fill_(-1)
        self.texts[slot, len(prompt) : end] = text.to(self.texts.device)

    def force(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Write to ``[rows, vocab]`` logits of rows at some positions of some slots, ``[rows]``.

        A row at a position draws the token of the next position.
        """
        wanted = self.texts[slots.long(), positions + 1][:, None]
        place = wanted.clamp(min=0)
        kept = logits.gather(1, place)
        logits.scatter_(1, place, kept.masked_fill(wanted >= 0, CERTAIN))


def replay(worker: Any, answers: dict[tuple[int, ...], list[int]]) -> int:
    """Replay answers in an engine; this runs in its worker. Returns how many there are."""
    runner = worker.model_runner
    replayed = Replay(answers, runner.max_num_reqs, runner.max_model_len, runner.device)
    state, model = runner.model_state, runner.model
    add, sample, compute = state.add_request, runner.sample, model.compute_logits
    batches: list[Any] = []

    @functools.wraps(add)
    def add_request(req_index: int, request: Any) -> None:
        add(req_index, request)
        replayed.add(req_index, request.prompt_token_ids)

    @functools.wraps(sample)
    def sample_instead(hidden: Any, batch: Any, *args: Any) -> Any:
        batches.append(batch)
        return sample(hidden, batch, *args)

    @functools.wraps(compute)
    def compute_instead(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        if batches and logits is not None:
            batch = batches.pop()
            positions = batch.positions[batch.logits_indices]
            replayed.force(logits, batch.expanded_idx_mapping, positions)
        return logits

    state.add_request, runner.sample, model.compute_logits = (
        add_request,
        sample_instead,
        compute_instead,
    )
    return len(answers)
