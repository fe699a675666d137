"""Splits of an engine's work that trees and graphs of a draft model refuse alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_graft.base.refusal import Find


def more_than_one(name: str) -> Find:
    """Refuse more than one rank of a kind.

    Args:
        name: attribute of vLLM's ``ParallelConfig`` with the number of these ranks; its flag has
            the same name.
    """

    def find(section: Any, vllm_config: Any) -> Iterator[str]:
        value = getattr(vllm_config.parallel_config, name)
        if value > 1:
            yield f"--{name.replace('_', '-')} is {value}: set it to 1."

    return find


def ubatching(whose: str) -> Find:
    """Refuse dual batch overlap, which splits rows; `whose` is the genitive of their owner."""

    def find(section: Any, vllm_config: Any) -> Iterator[str]:
        if vllm_config.parallel_config.use_ubatching:
            yield (
                f"Dual batch overlap splits the {whose} rows: drop --enable-dbo and --ubatch-size."
            )

    return find
