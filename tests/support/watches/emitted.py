"""How many tokens each request of an engine gets in each step."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def emitted(llm: Any) -> Iterator[dict[str, list[int]]]:
    """How many tokens each request got in each step that emitted any, by its number."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    stock, found = scheduler.update_from_output, defaultdict(list)

    def update_from_output(scheduled: Any, output: Any) -> Any:
        for name, tokens in zip(output.req_ids, output.sampled_token_ids):
            if tokens:
                found[name.partition("-")[0]].append(len(tokens))
        return stock(scheduled, output)

    scheduler.update_from_output = update_from_output
    try:
        yield found
    finally:
        del scheduler.update_from_output, scheduler
