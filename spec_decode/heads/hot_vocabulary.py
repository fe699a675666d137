"""The tokens that a tree's levels choose from, learned from what is read and what is emitted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_graft.spec_decode.trees.text_state import reference_in

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.states import RequestState

    from vllm_graft.base.metric import Numbers
    from vllm_graft.spec_decode.heads.fp8_head import HotRows
    from vllm_graft.spec_decode.tuning.step_times import Costs

PERIOD = 32
"""Steps after which the vocabulary is chosen anew."""

LATE = 8
"""Steps after a choice at which the host reads what was counted. The device is at most a few steps
behind and has the counts by then, so the host does not wait. All ranks of tensor parallelism read
at the same step."""

COVERAGE = 0.98
"""Fraction of the emitted tokens that the vocabulary must hold to be used, where nobody measured
what it saves. An accepted path of four tokens gets shorter by about twice the fraction that is
missing, while a level of a small head gets cheaper by a few percent of a step."""

LOST = 2.5
"""Part of a step's tokens that is lost per part of the text's tokens that the hot ones lack: a path
ends where a node's right child is none of them."""

KEPT = 0.992
"""Fraction of the counts that stays at each choice, so that the last few thousand steps count."""

RECENT = 0.9
"""Fraction of what the coverage is made of that stays at each choice: a period of one request has
about a hundred tokens, of which one alone is a percent."""

READ = 4096
"""The most tokens of a prompt that are counted, its last ones."""

_ROOM = 8 * READ
"""The most tokens of prompts that are counted per choice, the first that came."""


class HotVocabulary:
    """The most frequent of a draft's tokens, and their rows of the draft's output head.

    FR-Spec (Zhao et al. 2025, arXiv 2502.14856) cuts the head, most of what a level of a small
    draft reads, to a fixed list of tokens. Here the list follows the text that is served: the
    device counts emitted tokens, the tokens of new prompts (it is a `TextWatch`) are added, and
    every `PERIOD` steps the most frequent ones are chosen. It is used as long as it gains more than
    it loses.

    Attributes:
        emitted: int32 ``[vocab_size]``, tokens emitted since the last choice, counted by
            verification.
        target_ids: int64 ``[size]``, ascending. The address never changes, as CUDA graphs hold it.
        coverage: fraction of the recently emitted tokens that it held; None until known.
        teaches: int32 ``[max_reqs]`` by request-state index, 0 for requests whose texts do not
            count; None if all do.
        least: tells the coverage above which it is used, of a number of nodes and of requests.
    """

    def __init__(self, size: int, target_ids: torch.Tensor, vocab_size: int, rows: HotRows) -> None:
        device = target_ids.device
        on_cuda = device.type == "cuda"
        self._all, self.rows = target_ids, rows
        self.emitted = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self._counts = torch.zeros(len(target_ids), dtype=torch.float32, device=device)
        # Tokenizers number their merges by frequency: the first ids are a fair guess.
        self._chosen = torch.arange(size, device=device)
        self.target_ids = target_ids[:size].clone()
        rows.take(self._chosen)
        self.teaches: torch.Tensor | None = None
        self._taught: list[bool] = []
        self.active = False
        self.choices = self.steps_narrowed = 0
        self.coverage: float | None = None
        self.least: Callable[[int, int], float] = lambda nodes, num_reqs: COVERAGE
        self._steps = 0
        # Tokens of prompts. One is filled while the device may still copy the other.
        self._read, self._copying = (
            torch.zeros(_ROOM, dtype=torch.int64, pin_memory=on_cuda) for _ in range(2)
        )
        self._num_read = 0
        self._held = torch.zeros(2, device=device)
        self._found = torch.zeros(2, pin_memory=on_cuda)
        self._copied = torch.cuda.Event() if on_cuda else None

    def renew(self) -> None:
        """Copy the rows of the chosen tokens again, as the head's have changed."""
        self.rows.take(self._chosen)

    def attach(self, req_states: RequestState) -> None:
        """Do nothing: prompts come with their requests."""

    def begin(self, req_index: int, request: NewRequestData) -> None:
        """Count the tokens of a new request's prompt, at the next choice."""
        if self.teaches is not None:
            teaches = reference_in(request.sampling_params).teaches
            if teaches != self._taught[req_index]:
                self.teaches[req_index].fill_(int(teaches))
                self._taught[req_index] = teaches
            if not teaches:
                return
        self.read(request.prompt_token_ids or ())

    def keep_apart(self, max_reqs: int) -> torch.Tensor:
        """Count only the texts of requests that teach; return `teaches`."""
        self.teaches = torch.ones(max_reqs, dtype=torch.int32, device=self.emitted.device)
        self._taught = [True] * max_reqs
        return self.teaches

    def read(self, tokens: Any) -> None:
        """Count the last `READ` of a prompt's tokens, a sequence of the target's ids."""
        last = np.asarray(tokens[-READ:], dtype=np.int64)
        last = last[(last >= 0) & (last < len(self.emitted))][: _ROOM - self._num_read]
        end = self._num_read + len(last)
        self._read.numpy()[self._num_read : end] = last
        self._num_read = end

    def step(self) -> None:
        """Count a step that drafts. The host calls it in the order of the device's steps."""
        self._steps += 1
        since = self._steps % PERIOD
        if since == 0:
            self._choose()
        elif since == LATE:
            self._decide()

    def narrows(self, nodes: int, num_reqs: int) -> bool:
        """Whether a step drafts its trees from it: one of so many nodes and requests."""
        held = self.coverage
        self.active = held is not None and held > self.least(nodes, num_reqs)
        self.steps_narrowed += self.active
        return self.active

    def _choose(self) -> None:
        emitted = self.emitted[self._all].float()
        # The first vocabulary was a guess; what it held says nothing about the second.
        if self.choices:
            # Tokens that the draft can't propose at all do not count against the vocabulary.
            held = torch.stack((emitted[self._chosen].sum(), emitted.sum()))
            self._held.mul_(RECENT).add_(held)
        self._found.copy_(self._held, non_blocking=True)
        self._counts.mul_(KEPT).add_(emitted)
        self.emitted.zero_()
        self._add_prompts()
        if self._copied is not None:
            self._copied.record()
        # A stable sort takes the first of equally frequent tokens, so that all ranks agree.
        order = torch.sort(self._counts, descending=True, stable=True).indices
        self._chosen.copy_(order[: len(self._chosen)].sort().values)
        self.target_ids.copy_(self._all[self._chosen])
        self.rows.take(self._chosen)
        self.choices += 1

    def _add_prompts(self) -> None:
        if not self._num_read:
            return
        tokens = self._read[: self._num_read].to(self.emitted.device, non_blocking=True)
        counted = torch.zeros_like(self.emitted)
        counted.index_add_(0, tokens, torch.ones_like(tokens, dtype=counted.dtype))
        self._counts.add_(counted[self._all])
        self._read, self._copying, self._num_read = self._copying, self._read, 0

    def _decide(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        held, emitted = self._found.tolist()
        if emitted and self.choices > 1:
            self.coverage = held / emitted

    def report(self) -> dict[str, Any]:
        return {
            "size": len(self.target_ids),
            "bytes": self.rows.num_bytes,
            "active": self.active,
            "coverage": self.coverage,
            "choices": self.choices,
            "steps": self.steps_narrowed,
        }

    def numbers(self) -> Numbers:
        return {"hot_steps": self.steps_narrowed, "hot_coverage": self.coverage or 0.0}


class HotGains:
    """Compares steps that draft from the whole vocabulary with steps that draft from hot tokens."""

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
        """What steps are expected to cost where learned tokens hold `COVERAGE` of a text."""
        costs = {nodes: dict(counts) for nodes, counts in self._whole.items()}
        for nodes, counts in self._hot.items():
            costs[nodes] |= {
                count: seconds
                for count, seconds in counts.items()
                if self.least(nodes, count) < COVERAGE
            }
        return costs
