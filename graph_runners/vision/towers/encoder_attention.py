"""Attention of vLLM's vision encoders, under capture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention.ops import vit_attn_wrappers


@contextmanager
def all_rows_written() -> Iterator[None]:
    """Spare the zeros that vLLM writes under the output of each captured attention.

    Its graphs have padded rows that belong to no segment, and would keep what lay there before
    (vLLM #57136). Where every row belongs to a segment the attention writes them all, as in the
    eager pass: the zeros are a kernel a layer for nothing.
    """
    platform = vit_attn_wrappers.current_platform
    vit_attn_wrappers.current_platform = _NotAsked(platform)
    try:
        yield
    finally:
        vit_attn_wrappers.current_platform = platform


class _NotAsked:
    """The platform, which that module asks for nothing but whether to write zeros, and for ROCm."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda(self) -> bool:
        return False
