"""Where a configuration has its target."""

from __future__ import annotations

from typing import Any


def target_of(vllm_config: Any) -> Any:
    """The target's model configuration, also in a configuration derived for the draft."""
    return vllm_config.speculative_config.target_model_config or vllm_config.model_config
