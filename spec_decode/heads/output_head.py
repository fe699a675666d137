"""Where a draft keeps its output head, and how other products take the place of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Project = Callable[[torch.Tensor], torch.Tensor]
"""Computes logits ``[num_rows, any]`` of states ``[num_rows, hidden]`` that need no more norm."""


class OutputHead:
    """The output head of a draft, whose rows drafts may be chosen from in another way.

    EAGLE heads have an ``lm_head`` and a logits processor of their own. Modules for one token more
    (MTP) keep the processor one level deeper, and some have rows and a norm of their own, such as
    GLM-4.5's ``shared_head``. There a stand-in replaces the processor, and the draft computes
    logits once, so that the stand-in sees which rows it is passed.

    Raises:
        AttributeError: if the draft has no logits processor in either place.
    """

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self._stand_in: _StandIn | None = None
        if hasattr(draft, "logits_processor"):
            self.rows, self.processor = draft.lm_head, draft.logits_processor
            return
        found = draft.model.logits_processor
        if not isinstance(found, _StandIn):
            found = draft.model.logits_processor = _StandIn(found)
            token = torch.zeros(1, dtype=torch.int32, device=next(draft.parameters()).device)
            with torch.inference_mode():
                # Any states do: which rows they are multiplied by is all that is asked.
                draft.compute_logits(draft.model.embed_tokens(token))
        self._stand_in, self.rows, self.processor = found, found.rows, found.processor

    def logits(self, hidden: torch.Tensor, project: Project) -> torch.Tensor:
        """Compute logits by ``project`` of states behind the draft's own norm. Capturable."""
        if self._stand_in is None:
            return project(hidden)
        self._stand_in.project = project
        try:
            logits: torch.Tensor = self._draft.compute_logits(hidden)
        finally:
            self._stand_in.project = None
        return logits


class _StandIn(nn.Module):
    """Stands for a logits processor, and does what it does unless there is something else to do."""

    def __init__(self, processor: Any) -> None:
        super().__init__()
        self.processor: Any = processor
        self.project: Project | None = None
        self.rows: Any = None

    def forward(self, rows: Any, states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.project is not None:
            return self.project(states)
        if self.rows is None:
            # Not as a part of this module, because the rows are the draft's.
            object.__setattr__(self, "rows", rows)
        return self.processor(rows, states, *args, **kwargs)
