"""FULL graphs of a decode whose width, the rows per request, changes from step to step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from vllm_graft.seams import graph_tables

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def request_counts(largest: int) -> list[int]:
    """Numbers of requests to capture, up to `largest`: at most a third of a batch is padding."""
    if largest < 1:
        return []
    return [*(count for count in _COUNTS if count < largest), largest]


def plan_widths(manager: CudaGraphManager, counts: Mapping[int, Sequence[int]]) -> None:
    """Plan which uniform FULL graphs a manager captures, and which of them a batch takes. vLLM
    rounds every capture size up to a multiple of every width, which makes hundreds of graphs. It
    then offers a number of tokens the graphs of one size only. Here each width that the manager
    planned has graphs for `counts` of requests, and a batch takes the smallest one that fits."""
    planned = graph_tables.planned(manager)
    uniform = [desc for desc in planned if desc.uniform_token_count is not None]
    if not uniform:
        return
    templates = {(desc.uniform_token_count, desc.num_active_loras): desc for desc in uniform}
    new: list[BatchExecutionDescriptor] = [
        replace(desc, num_tokens=width * count, num_reqs=count)
        for (width, _), desc in templates.items()
        for count in counts.get(width or 0, ())
    ]
    others = [desc for desc in planned if desc.uniform_token_count is None]
    graph_tables.plan(manager, [*new, *others])
    _put_first(manager, new)


def _put_first(manager: CudaGraphManager, descs: list[BatchExecutionDescriptor]) -> None:
    """Offer each number of tokens the smallest fitting graph of each width, before other graphs."""
    serving = graph_tables.serving(manager)
    largest = max((desc.num_tokens for desc in descs), default=0)
    loras = {desc.num_active_loras for desc in descs}
    for key in [(tokens, lora) for tokens in range(largest + 1) for lora in loras]:
        serving.setdefault(key, [])
    ascending = sorted(descs, key=lambda desc: desc.num_tokens)
    for (tokens, lora), candidates in serving.items():
        best: dict[int | None, BatchExecutionDescriptor] = {}
        for desc in ascending:
            if desc.num_tokens >= tokens and desc.num_active_loras == lora:
                best.setdefault(desc.uniform_token_count, desc)
        candidates[:] = [
            *best.values(),
            *(desc for desc in candidates if desc.uniform_token_count is None),
        ]
