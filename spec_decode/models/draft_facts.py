"""Facts that a draft's configuration tells: its vocabulary, its candidates, whether it has K/V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_graft.base.options import target_of

CANDIDATE_KEYS = ("selector_top_k", "lilicorr_candidate_topk")
"""Keys of a draft's ``dflash_config`` that say how many candidates a position has."""

_ASSISTANTS = ("gemma4_mtp",)
"""Model types of drafts whose layers read the target's K/V and have none of their own."""


def is_assistant(draft: Any) -> bool:
    """Whether vLLM's model config of a draft, or None, is that of an assistant."""
    return getattr(getattr(draft, "hf_config", None), "model_type", None) in _ASSISTANTS


def draft_vocabulary(vllm_config: Any) -> int:
    """Tokens that the draft can propose; 0 if no model says."""
    draft = vllm_config.speculative_config.draft_model_config
    own = getattr(getattr(draft, "hf_config", None), "draft_vocab_size", None)
    target = target_of(vllm_config)
    return int(own or (0 if target is None else target.get_vocab_size()))


def num_candidates_of(speculative: Any) -> int | None:
    """Candidates per position of a DFlash 2 or LiLiCorr draft; None for other drafts."""
    draft = getattr(speculative.draft_model_config, "hf_config", None)
    draft_config = getattr(draft, "dflash_config", None)
    if not isinstance(draft_config, Mapping):
        return None
    counts = (draft_config.get(key) for key in CANDIDATE_KEYS)
    return next((int(count) for count in counts if isinstance(count, int)), None)
