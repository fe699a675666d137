"""Whether the tokens of a draft's own vocabulary are tokens of the target."""

from __future__ import annotations

from typing import Any

import torch

from vllm_graft.base.errors import ConfigError
from vllm_graft.base.log import warning_once
from vllm_graft.base.values import shown

FLAG = "--speculative-config.model"


def check_draft_tokens(draft: Any, vocab_size: int, path: str) -> None:
    """Refuse a draft whose ``d2t`` leads out of the target's vocabulary, and warn without one.

    A draft of fewer tokens than the target adds an offset of ``d2t`` to each of its ids. vLLM fills
    it with zeros where the draft's files have none.

    Args:
        draft: the loaded draft model.
        vocab_size: tokens of the target.
        path: where the draft was loaded from, for the messages.

    Raises:
        ConfigError: if an id is no token of the target.
    """
    offsets: torch.Tensor | None = getattr(draft, "draft_id_to_target_id", None)
    if offsets is None or offsets.is_meta:
        return
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise ConfigError(
            f"{FLAG}: d2t of {shown(path)} leads from {len(outside)} of the draft's "
            f"{len(offsets)} tokens out of the target's vocabulary, token {first} to "
            f"{int(ids[first])}, but its ids are 0 to {vocab_size - 1}: use a draft that was made "
            "for this target, whose d2t holds target id minus draft id"
        )
    if len(offsets) < vocab_size and not offsets.any():
        warning_once(
            f"{FLAG}: {shown(path)} drafts {len(offsets)} of the target's {vocab_size} tokens and "
            "has no d2t, so they are taken for the target's first ones; if they are others, hardly "
            "a draft is accepted"
        )
