"""What stands under ``graft.learn``."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from vllm_graft.base.options import Bytes, Count, GraftSection, Switch

NAME = "learn"


class LearnConfig(GraftSection):
    """Records of finished requests, which ``vllm-graft train --from-traffic`` and ``vllm-graft
    learn`` learn from, and heads that the latter publishes. It may stand beside a preset:
    ``{"preset": "auto", "learn": {...}}``."""

    NAME = NAME

    record: Annotated[str, Field(min_length=1)] | None = None
    """Folder for the token ids of finished requests, prompts and answers. It is made with rights
    for its owner alone. Several engines may share it."""

    record_bytes: Annotated[Bytes, Field(ge=2**20)] = ByteSize(2**30)
    """Most bytes of the folder's records; the oldest ones make room. A token takes about 6."""

    record_salted: Switch = False
    """Whether requests with a ``cache_salt``, which keeps a tenant's K/V apart, are recorded."""

    follow: Annotated[str, Field(min_length=1)] | None = None
    """Folder in which ``vllm-graft learn`` publishes heads that went on learning from the one that
    is served. Each new one is swapped in between two steps, and out again if trees yield less."""

    follow_trees: Annotated[Count, Field(ge=100)] = 50_000
    """How many trees, one per request and step, are compared before and after a swap. A head that
    is much worse is swapped out after a tenth of them."""

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.record is None and self.follow is None:
            raise ValueError("give record, follow, or both")
        return self
