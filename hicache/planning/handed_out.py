"""The blocks that a step gives to requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def handed_out(output: SchedulerOutput) -> Iterator[int]:
    """Blocks that requests got in this step; those of a cache hit are among them."""
    tables: list[Any] = [new.block_ids for new in output.scheduled_new_reqs]
    tables += [ids for ids in output.scheduled_cached_reqs.new_block_ids if ids is not None]
    for table in tables:
        for ids in table:
            yield from ids
    for copy in output.kv_cache_block_copies or ():
        yield copy.dst_block_id
