"""Assistants: drafts whose layers read the target's K/V, and have none of their own."""

from __future__ import annotations

from typing import Any

_TYPES = ("gemma4_mtp",)
"""VLLM's names for the types of such drafts."""


def is_assistant(draft: Any) -> bool:
    """Whether vLLM's model config of a draft, or None, is that of an assistant."""
    return getattr(getattr(draft, "hf_config", None), "model_type", None) in _TYPES
