"""What stands under ``graft.learn``."""

from __future__ import annotations

from typing import Annotated

from pydantic import ByteSize, Field

from vllm_graft.base.options import Bytes, GraftSection

NAME = "learn"


class LearnConfig(GraftSection):
    """Records of finished requests, which ``vllm-graft train --from-traffic`` learns from. It may
    stand beside a preset: ``{"preset": "auto", "learn": {...}}``."""

    NAME = NAME

    record: Annotated[str, Field(min_length=1)]
    """Folder for the token ids of finished requests, prompts and answers. It is made with rights
    for its owner alone. Several engines may share it."""

    record_bytes: Annotated[Bytes, Field(ge=2**20)] = ByteSize(2**30)
    """Most bytes of the folder's records; the oldest ones make room. A token takes about 6."""

    record_salted: bool = False
    """Whether requests with a ``cache_salt``, which keeps a tenant's K/V apart, are recorded."""
