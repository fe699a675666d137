"""Prompts are computed in chunks where a step fits a CUDA graph by that, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_graft.spec_decode.chunking.mixed_rows import captured_rows
from vllm_graft.spec_decode.chunking.prompt_chunks import (
    LEAST_ROWS,
    MOST_CHUNKS,
    can_chunk,
    chunk_prompts,
    chunk_rows,
    is_chunked,
    rows_to_come,
    step_limit,
)


@pytest.mark.parametrize(
    ("decodes", "prompts", "expected"),
    [
        (0, 512, None),  # It fits.
        (0, 513, 512),
        (64, 448, None),
        (64, 449, 448),
        (64, 3 * 512 - 64, 448),
        (64, 3 * 512 - 63, None),  # So many rows keep the device busy.
        (512, 0, None),  # No prompt waits.
        (512, 300, 256),  # The trees are cut for it.
        (512, 256, None),
        (2000, 10, None),
    ],
)
def test_rows_of_a_chunk(decodes: int, prompts: int, expected: int | None) -> None:
    assert chunk_rows(decodes, prompts, 512) == expected


def test_every_chunk_has_room_for_a_tree_of_placeholders() -> None:
    """VLLM reserves a full tree's rows beside a prompt of one token, and waits if there are less.

    So a chunk that is smaller would keep such a prompt waiting for ever.
    """
    most_nodes = 63
    for max_rows in (LEAST_ROWS, 200, 512):
        for decodes in range(0, MOST_CHUNKS * max_rows, 7):
            for prompts in range(0, MOST_CHUNKS * max_rows, 31):
                chunk = chunk_rows(decodes, prompts, max_rows)
                assert chunk is None or 1 + most_nodes <= chunk < prompts


def test_chunks_take_no_more_steps_than_replays_are_preferred() -> None:
    for prompts in range(513, MOST_CHUNKS * 512 + 1):
        steps, left = 0, prompts
        while left:
            left -= chunk_rows(0, left, 512) or left
            steps += 1
        assert 2 <= steps <= MOST_CHUNKS


def request(tokens: int, computed: int = 0, *, drafts: int = 0, placeholders: int = 0) -> Any:
    return SimpleNamespace(
        num_tokens=tokens,
        num_tokens_with_spec=tokens + drafts,
        num_output_placeholders=placeholders,
        num_computed_tokens=computed,
        is_prefill_chunk=computed < tokens + placeholders - 1,
    )


def scheduler(running: list[Any], waiting: list[Any], most_running: int = 8) -> Any:
    made: Any = SimpleNamespace(
        running=running,
        waiting=waiting,
        max_num_running_reqs=most_running,
        max_num_scheduled_tokens=8192,
        limits=[],
        requests={},
    )

    def schedule(throttle_prefills: bool = False) -> Any:
        made.limits.append((made.max_num_scheduled_tokens, throttle_prefills))
        return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(made.requests, 1))

    made.schedule = schedule
    return made


def test_rows_are_those_that_vllm_would_schedule() -> None:
    # Of an asynchronous scheduler: a token is on its way, and stands for itself and its drafts.
    tree = request(100, 100, drafts=15, placeholders=1)
    half = request(900, 300)
    stub = scheduler([tree, half], [request(200), request(50, 16)])
    assert rows_to_come(stub, 1536) == (16, 600 + 200 + 34)
    # Only two more requests may run.
    stub.max_num_running_reqs = 3
    assert rows_to_come(stub, 1536) == (16, 600 + 200)
    # Nobody counts a long queue to its end.
    stub = scheduler([], [request(1000) for _ in range(9)], 100)
    assert rows_to_come(stub, 1536) == (0, 2000)


def test_a_step_without_prompts_has_no_limit() -> None:
    running = [request(100, 100, drafts=63, placeholders=1) for _ in range(9)]
    assert step_limit(scheduler(running, []), 512) is None
    assert step_limit(scheduler(running, [request(300)], 10), 512) == 9 * 64 + 256


def test_the_limit_holds_for_one_step() -> None:
    stub = scheduler([request(100, 100, drafts=15, placeholders=1)], [request(1000)])
    for _ in range(2):
        chunk_prompts(stub, 512)
    stub.requests = {"tree": SimpleNamespace(is_prefill_chunk=False)}
    # The prompt waits for something else than rows, and is not in the step.
    assert not is_chunked(stub.schedule(throttle_prefills=True))
    stub.requests["prompt"] = SimpleNamespace(is_prefill_chunk=True)
    assert is_chunked(stub.schedule(throttle_prefills=True))
    assert stub.max_num_scheduled_tokens == 8192
    stub.waiting = [request(100)]
    assert not is_chunked(stub.schedule())
    # A smaller limit of vLLM's own stays.
    stub.waiting, stub.max_num_scheduled_tokens = [request(1000)], 256
    assert not is_chunked(stub.schedule())
    assert stub.limits == [(512, True), (512, True), (8192, False), (256, False)]


def test_a_scheduler_that_fails_keeps_its_limit() -> None:
    stub = scheduler([], [request(1000)])

    def schedule() -> Any:
        raise RuntimeError("no blocks")

    stub.schedule = schedule
    chunk_prompts(stub, 512)
    with pytest.raises(RuntimeError, match="no blocks"):
        stub.schedule()
    assert stub.max_num_scheduled_tokens == 8192


@pytest.mark.parametrize(
    ("chunked_prefill", "rows", "expected"),
    [(True, LEAST_ROWS, True), (True, LEAST_ROWS - 1, False), (False, 512, False)],
)
def test_where_prompts_can_be_chunked(chunked_prefill: bool, rows: int, expected: bool) -> None:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked_prefill)
    )
    assert can_chunk(config, rows) is expected


def test_only_graphs_of_mixed_batches_count() -> None:
    def graph(rows: int, width: int | None) -> BatchExecutionDescriptor:
        return BatchExecutionDescriptor(
            CUDAGraphMode.FULL, num_tokens=rows, num_reqs=4, uniform_token_count=width
        )

    manager = SimpleNamespace(graphs={graph(1024, 16): 0, graph(64, None): 0, graph(512, None): 0})
    runner = SimpleNamespace(cudagraph_manager=manager)
    worker = SimpleNamespace(model_runner=runner)
    assert captured_rows(worker) == 512
    manager.graphs = {graph(1024, 16): 0}
    assert captured_rows(worker) == 0
    runner.cudagraph_manager = None
    assert captured_rows(worker) == 0
