"""What an engine drafts for each request, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm_graft.testing import model_runner

Drafted = dict[tuple[str, int], list[int]]


@contextlib.contextmanager
def drafted(llm: Any) -> Iterator[Drafted]:
    """The drafts of each request, by its number and how many tokens of its text were computed."""
    speculator = model_runner(llm).speculator
    stock, found = speculator.propose, {}

    def propose(batch: Any, *args: Any, **kwargs: Any) -> Any:
        num_rejected = args[5]
        lengths = batch.seq_lens[: batch.num_reqs] - num_rejected[: batch.num_reqs]
        drafts = stock(batch, *args, **kwargs)
        if not kwargs.get("dummy_run"):
            for name, length, tokens in zip(batch.req_ids, lengths.tolist(), drafts.tolist()):
                found[name.partition("-")[0], length] = tokens
        return drafts

    speculator.propose = propose
    try:
        yield found
    finally:
        del speculator.propose, speculator
