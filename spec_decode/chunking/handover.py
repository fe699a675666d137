"""Hands what an engine's workers have said to the scheduler, which is built later.

vLLM builds the scheduler after the workers, in the same process and from the same configuration
object: that object says whose it is.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Handover(Generic[T]):
    """Keeps one value for each configuration until the scheduler takes it."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, T]] = []

    def keep(self, vllm_config: Any, value: T) -> None:
        """Keep a value for a configuration; its earlier one is forgotten."""
        self.take(vllm_config)
        self._kept.append((vllm_config, value))

    def take(self, vllm_config: Any) -> T | None:
        """The value that was kept for a configuration, once; None if there is none."""
        for place, (owner, value) in enumerate(self._kept):
            if owner is vllm_config:
                del self._kept[place]
                return value
        return None
