"""How many hot tokens a preset lets a draft choose from."""

from __future__ import annotations

from typing import Any

from vllm_graft.spec_decode.config.chosen import grows_by_levels
from vllm_graft.spec_decode.config.target_config import target_of
from vllm_graft.spec_decode.config.tree_config import TreeConfig

SIZE = 49_152
"""Hot tokens. Learned lists of so many held 98 to 99 % of what Qwen's tokenizer makes of the
answers of ShareGPT, where 32,768 held 97 to 99 %."""

_LARGE = 2 * SIZE
"""A draft vocabulary from which on a level reads clearly less without the rest."""


def hot_size(vllm_config: Any) -> int | None:
    """The number of hot tokens for a draft whose levels read a large output head, else None."""
    speculative = vllm_config.speculative_config
    if not grows_by_levels(TreeConfig(), speculative):
        return None
    return SIZE if draft_vocabulary(vllm_config) >= _LARGE else None


def draft_vocabulary(vllm_config: Any) -> int:
    """Tokens that the draft can propose; 0 if no model says."""
    draft = vllm_config.speculative_config.draft_model_config
    own = getattr(getattr(draft, "hf_config", None), "draft_vocab_size", None)
    target = target_of(vllm_config)
    return int(own or (0 if target is None else target.get_vocab_size()))
