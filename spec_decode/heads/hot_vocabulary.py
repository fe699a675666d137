"""The tokens that a tree's levels choose from, learned from what the target emits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

PERIOD = 128
"""Steps after which the vocabulary is chosen anew."""

LATE = 16
"""Steps after a choice at which the host reads what was counted: the device, at most a few steps
behind, has it by then, so nothing waits. All ranks of tensor parallelism read at the same step."""

COVERAGE = 0.98
"""Share of the emitted tokens that the vocabulary has to hold to be used. An accepted path of four
tokens gets shorter by about two times the share that is missing, and a level cheaper by a few
percent of a step."""

KEPT = 0.97
"""Share of the counts that stays at each choice: texts of the last few thousand steps count."""


class HotVocabulary:
    """The most frequent of a draft's tokens, and their rows of its output head.

    A draft's head is a third of what an EAGLE-3 level reads, and most of what an EAGLE-1 level
    does. FR-Spec (Zhao et al. 2025, arXiv 2502.14856) cuts it to a fixed list made beforehand from
    a corpus. Here the list follows the text that is served: the device counts emitted tokens, and
    every `PERIOD` steps the most frequent ones are chosen. It is used while it held `COVERAGE` of
    the tokens emitted after it was chosen; otherwise drafts come from the whole vocabulary.

    Args:
        size: tokens to choose.
        target_ids: int64 ``[draft_vocab]``, each draft token's id of the target.
        vocab_size: of the target.
        gather: returns the head's rows ``[n, hidden]`` of draft ids int64 ``[n]``, in `out` if
            that is given; on all ranks of tensor parallelism at once.

    Attributes:
        emitted: int32 ``[vocab_size]``, tokens emitted since the last choice, counted by
            verification.
        target_ids: int64 ``[size]``, ascending; static, as CUDA graphs bake its address in.
        weight: ``[size, hidden]``, their rows; static.
        active: whether the vocabulary is to be used.
        coverage: share of the tokens of the period before that it held; None until known.
        choices: how often it was chosen.
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
        """Note a step that has drafts verified; called on the host, in the device's order."""
        self._steps += 1
        since = self._steps % PERIOD
        if since == 0:
            self._choose()
        elif since == LATE:
            self._decide()

    def _choose(self) -> None:
        """Count what the vocabulary held, and choose the next one."""
        emitted = self.emitted[self._all].float()
        # What no draft can propose is no fault of the vocabulary.
        held = torch.stack((emitted[self._rows].sum(), emitted.sum()))
        self._found.copy_(held, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        self._counts.mul_(KEPT).add_(emitted)
        self.emitted.zero_()
        # Stable: of tokens that are as frequent the first, so that all ranks agree.
        order = torch.sort(self._counts, descending=True, stable=True).indices
        self._rows.copy_(order[: len(self._rows)].sort().values)
        self.target_ids.copy_(self._all[self._rows])
        self._gather(self._rows, out=self.weight)
        self.choices += 1

    def _decide(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        held, emitted = self._found.tolist()
        # The first vocabulary was a guess; what it held says nothing of the second.
        if emitted and self.choices > 1:
            self.coverage = held / emitted
            self.active = self.coverage >= COVERAGE

    def report(self) -> dict[str, Any]:
        """What ``graft_info()`` says of it."""
        return {
            "size": len(self.target_ids),
            "active": self.active,
            "coverage": self.coverage,
            "choices": self.choices,
        }
