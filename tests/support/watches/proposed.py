"""What a drafter proposes, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_graft.testing import model_runner

if TYPE_CHECKING:
    from vllm import LLM


@contextmanager
def proposed(llm: LLM) -> Iterator[list[list[list[int]]]]:
    """Record the drafts of each step inside the ``with`` block, by request, of an engine here."""
    speculator, found = model_runner(llm).speculator, []
    stock = speculator.propose

    def noted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = stock(batch, *args, **kwargs)
        found.append(tokens[: batch.num_reqs].tolist())
        return tokens

    speculator.propose = noted
    try:
        yield found
    finally:
        del speculator.propose
