"""The tokens that a tree's levels choose from, learned from what the target emits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD = 128
"""Steps after which the vocabulary is chosen anew."""

LATE = 16
"""Steps after a choice at which the host reads what was counted. The device is at most a few steps
behind and has the counts by then, so the host does not wait. All ranks of tensor parallelism read
at the same step."""

COVERAGE = 0.98
"""Fraction of the emitted tokens that the vocabulary must hold to be used. An accepted path of four
tokens gets shorter by about twice the fraction that is missing, while a level gets cheaper by a few
percent of a step."""

KEPT = 0.97
"""Fraction of the counts that stays at each choice, so that the last few thousand steps count."""


class HotVocabulary:
    """The most frequent of a draft's tokens, and their rows of the draft's output head.

    The head is a third of what an EAGLE-3 level reads, and most of what an EAGLE-1 level reads.
    FR-Spec (Zhao et al. 2025, arXiv 2502.14856) cuts it to a fixed list of tokens, made beforehand
    from a corpus. Here the list follows the text that is served: the device counts emitted tokens,
    and every `PERIOD` steps the most frequent ones are chosen. The list is used as long as it held
    `COVERAGE` of the tokens emitted after it was chosen; otherwise drafts come from the whole
    vocabulary.

    Args:
        size: number of tokens to choose.
        target_ids: int64 ``[draft_vocab]``, the target's id of each draft token.
        vocab_size: size of the target's vocabulary.
        gather: returns the head's rows ``[n, hidden]`` of draft ids int64 ``[n]``, in `out` if
            that is given. All ranks of tensor parallelism call it at once.

    Attributes:
        emitted: int32 ``[vocab_size]``, tokens emitted since the last choice, counted by
            verification.
        target_ids: int64 ``[size]``, ascending. The address never changes, as CUDA graphs hold it.
        weight: ``[size, hidden]``, the head's rows of these tokens, at a fixed address, too.
        active: whether the vocabulary is to be used.
        coverage: fraction of the last period's tokens that it held; None until known.
        choices: how often a vocabulary was chosen.
    """

    def __init__(
        self,
        size: int,
        target_ids: torch.Tensor,
        vocab_size: int,
        gather: Callable[..., torch.Tensor],
    ) -> None:
        device = target_ids.device
        self._all, self._gather = target_ids, gather
        self.emitted = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._counts = torch.zeros(len(target_ids), dtype=torch.float32, device=device)
        # Tokenizers number their merges by frequency: the first ids are a fair guess.
        self._rows = torch.arange(size, device=device)
        self.target_ids = target_ids[:size].clone()
        self.weight = gather(self._rows)
        self.active, self.choices = False, 0
        self.coverage: float | None = None
        self._steps = 0
        on_cuda = device.type == "cuda"
        self._found = torch.zeros(2, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None

    def step(self) -> None:
        """Count a step that drafts. The host calls it in the order of the device's steps."""
        self._steps += 1
        since = self._steps % PERIOD
        if since == 0:
            self._choose()
        elif since == LATE:
            self._decide()

    def _choose(self) -> None:
        """Count what the vocabulary held, and choose the next one."""
        emitted = self.emitted[self._all].float()
        # Tokens that the draft can't propose at all do not count against the vocabulary.
        held = torch.stack((emitted[self._rows].sum(), emitted.sum()))
        self._found.copy_(held, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._counts.mul_(KEPT).add_(emitted)
        self.emitted.zero_()
        # A stable sort takes the first of equally frequent tokens, so that all ranks agree.
        order = torch.sort(self._counts, descending=True, stable=True).indices
        self._rows.copy_(order[: len(self._rows)].sort().values)
        self.target_ids.copy_(self._all[self._rows])
        self._gather(self._rows, out=self.weight)
        self.choices += 1

    def _decide(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        held, emitted = self._found.tolist()
        # The first vocabulary was a guess; what it held says nothing about the second.
        if emitted and self.choices > 1:
            self.coverage = held / emitted
            self.active = self.coverage >= COVERAGE

    def report(self) -> dict[str, Any]:
        """What ``graft_info()`` says about it."""
        return {
            "size": len(self.target_ids),
            "active": self.active,
            "coverage": self.coverage,
            "choices": self.choices,
        }
