"""The attention of vLLM's vision encoders while it is captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention.ops import vit_attn_wrappers


@contextmanager
def all_rows_written() -> Iterator[None]:
    """Keep vLLM from zeroing the output of each captured attention in the body.

    vLLM's own graphs need the zeros: their padded rows belong to no segment, so attention does not
    write them (vLLM #57136). In our graphs every row belongs to a segment and is written, so the
    zeros would be one useless kernel per layer.
    """
    platform = vit_attn_wrappers.current_platform
    vit_attn_wrappers.current_platform = _NotCuda(platform)
    try:
        yield
    finally:
        vit_attn_wrappers.current_platform = platform


class _NotCuda:
    """The platform, but not CUDA: vLLM's attention module asks that only to decide about zeros."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda(self) -> bool:
        return False
