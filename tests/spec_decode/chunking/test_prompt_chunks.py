"""Prompts are computed in chunks where a step fits a CUDA graph by that, and only there."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from vllm_graft.spec_decode.chunking.graph_fit import (
    LEAST_NODES,
    LEAST_ROWS,
    MOST_CHUNKS,
    QUIET_STEPS,
    Rows,
    can_chunk,
    captured_rows,
    chunk_prompts,
    chunk_rows,
    is_chunked,
    nodes_that_fit,
    rows_to_come,
    step_limit,
)


@pytest.mark.parametrize(
    ("decodes", "roots", "prompts", "cut", "uncut"),
    [
        (0, 0, 512, None, None),  # It fits.
        (0, 0, 513, 512, 512),
        (64, 64, 448, None, None),
        (64, 64, 449, 448, 448),
        (64, 64, 3 * 512 - 64, 448, 448),
        (64, 64, 3 * 512 - 63, None, None),  # So many rows keep the device busy.
        (512, 8, 0, None, None),  # No prompt waits.
        (512, 128, 300, 256, 256),  # The prompts have half of the graph, whatever the trees.
        (512, 8, 300, None, 256),  # All prompts fit beside trees of seven nodes.
        (512, 8, 449, 448, 256),
        (320, 5, 3 * 512 - 40, 472, None),  # Uncut, so many rows keep the device busy.
        (2000, 32, 10, None, None),
    ],
)
def test_rows_of_a_chunk(
    decodes: int, roots: int, prompts: int, cut: int | None, uncut: int | None
) -> None:
    rows = Rows(decodes, roots, prompts)
    assert chunk_rows(rows, 512, cuts=True) == cut
    assert chunk_rows(rows, 512, cuts=False) == uncut


@pytest.mark.parametrize("cuts", [True, False])
def test_every_chunk_has_room_for_a_tree_of_placeholders(cuts: bool) -> None:
    """VLLM reserves a full tree's rows beside a prompt of one token, and waits if there are less.

    So a chunk that is smaller would keep such a prompt waiting for ever.
    """
    most_nodes = 63
    for max_rows in (LEAST_ROWS, 200, 512):
        for decodes in range(0, MOST_CHUNKS * max_rows, 7):
            for prompts in range(0, MOST_CHUNKS * max_rows, 31):
                for width in (1, 4, 64):
                    rows = Rows(decodes, decodes // width, prompts)
                    chunk = chunk_rows(rows, max_rows, cuts=cuts)
                    assert chunk is None or 1 + most_nodes <= chunk < prompts


def test_chunks_take_no_more_steps_than_replays_are_preferred() -> None:
    for prompts in range(513, MOST_CHUNKS * 512 + 1):
        steps, left = 0, prompts
        while left:
            left -= chunk_rows(Rows(0, 0, left), 512, cuts=True) or left
            steps += 1
        assert 2 <= steps <= MOST_CHUNKS


@pytest.mark.parametrize("count", range(1, 33))
def test_trees_beside_a_chunk_keep_their_first_nodes(count: int) -> None:
    """The step that a chunk makes fits once its trees are cut, and each keeps what it shall."""
    width = 64
    rows = Rows(count * width, count, 900)
    chunk = chunk_rows(rows, 512, cuts=True)
    assert chunk is not None
    scheduled = {f"tree {place}": width for place in range(count)} | {"prompt": chunk}
    drafts = {f"tree {place}": [-1] * (width - 1) for place in range(count)}
    kept = nodes_that_fit(scheduled, drafts, 512)
    assert kept is None or kept >= LEAST_NODES
    assert (kept is None) is (count * width + chunk <= 512)


def request(tokens: int, computed: int = 0, *, drafts: int = 0, placeholders: int = 0) -> Any:
    return SimpleNamespace(
        num_tokens=tokens,
        num_tokens_with_spec=tokens + drafts,
        num_output_placeholders=placeholders,
        num_computed_tokens=computed,
        is_prefill_chunk=computed < tokens + placeholders - 1,
    )


def scheduler(
    running: list[Any], waiting: list[Any], most_running: int = 8, drafts: int = 15
) -> Any:
    """A scheduler whose steps have the rows of `made.scheduled`, by the requests' names."""
    made: Any = SimpleNamespace(
        running=running,
        waiting=waiting,
        max_num_running_reqs=most_running,
        max_num_scheduled_tokens=8192,
        dynamic_sd_lookup=[0] + [drafts] * most_running,
        limits=[],
        requests={},
        scheduled={},
        counted=[],
    )

    def schedule(throttle_prefills: bool = False) -> Any:
        made.limits.append((made.max_num_scheduled_tokens, throttle_prefills))
        output = SimpleNamespace(
            num_scheduled_tokens=made.scheduled, num_spec_tokens_to_schedule=drafts
        )
        made._update_after_schedule(output)
        return output

    made.schedule = schedule
    made._update_after_schedule = made.counted.append
    return made


def test_rows_are_those_that_vllm_would_schedule() -> None:
    # Of an asynchronous scheduler: a token is on its way, and stands for itself and its drafts.
    tree = request(100, 100, drafts=15, placeholders=1)
    half = request(900, 300)
    stub = scheduler([tree, half], [request(200), request(50, 16)])
    assert rows_to_come(stub, 1536) == (16, 1, 600 + 200 + 34)
    # Only two more requests may run.
    stub.max_num_running_reqs = 3
    assert rows_to_come(stub, 1536) == (16, 1, 600 + 200)
    # Nobody counts a long queue to its end.
    stub = scheduler([], [request(1000) for _ in range(9)], 100)
    assert rows_to_come(stub, 1536) == (0, 0, 2000)


def test_a_step_without_prompts_has_no_limit() -> None:
    running = [request(100, 100, drafts=63, placeholders=1) for _ in range(9)]
    assert step_limit(scheduler(running, []), 512, cuts=True) is None
    stub = scheduler(running, [request(441)], 10)
    assert step_limit(stub, 512, cuts=True) == 9 * 64 + 440
    assert step_limit(stub, 512, cuts=False) == 9 * 64 + 256


def test_the_limit_holds_for_one_step() -> None:
    tree = request(100, 100, drafts=15, placeholders=1)
    prompt = request(1000)
    stub = scheduler([tree], [prompt])
    for _ in range(2):
        chunk_prompts(stub, 512, cuts=True)
    stub.requests, stub.scheduled = {"tree": tree, "prompt": prompt}, {"tree": 16}
    # The prompt waits for something else than rows, and is not in the step.
    assert not is_chunked(stub.schedule(throttle_prefills=True))
    stub.scheduled = {"tree": 16, "prompt": 504}
    assert is_chunked(stub.schedule(throttle_prefills=True))
    assert stub.max_num_scheduled_tokens == 8192
    stub.waiting = [request(100)]
    assert not is_chunked(stub.schedule())
    # A smaller limit of vLLM's own stays.
    stub.waiting, stub.max_num_scheduled_tokens = [prompt], 256
    assert not is_chunked(stub.schedule())
    # Of 16 rows of the tree the prompt leaves eight.
    assert stub.limits == [(520, True), (520, True), (8192, False), (256, False)]


@pytest.mark.parametrize("table", [True, False])
def test_no_drafts_are_asked_for_while_a_prompt_waits(table: bool) -> None:
    """The scheduler and the workers are told the same number. A fixed tree is drafted as ever."""
    tree = request(100, 100, drafts=15, placeholders=1)
    prompt = request(1000)
    stub = scheduler([tree, prompt], [])
    if not table:
        stub.dynamic_sd_lookup = None
    chunk_prompts(stub, 512, cuts=True)
    stub.requests = {"tree": tree, "prompt": prompt}
    asked = []
    for scheduled in ({"tree": 16, "prompt": 504}, {"tree": 1, "prompt": 496}, {"tree": 1}):
        stub.scheduled = scheduled
        output = stub.schedule()
        assert stub.counted[-1] is output
        asked.append(output.num_spec_tokens_to_schedule)
        prompt.num_computed_tokens += scheduled.get("prompt", 0)
    assert asked == ([0, 15, 15] if table else [15, 15, 15])


def steps_without_drafts(prompts: list[int], steps: int) -> list[bool]:
    """Which steps draft nothing while prompts of so many tokens follow each other beside a tree."""
    tree = request(100, 100, drafts=15, placeholders=1)
    stub = scheduler([tree], [])
    chunk_prompts(stub, 512, cuts=True)
    coming, prompt, found = list(prompts), None, []
    for _ in range(steps):
        if prompt is None and coming:
            prompt = request(coming.pop(0))
        stub.running = [tree, prompt] if prompt else [tree]
        stub.requests = {"tree": tree, "prompt": prompt}
        limit = step_limit(stub, 512, cuts=True) or 8192
        stub.scheduled = {"tree": 16}
        if prompt:
            left = prompt.num_tokens - prompt.num_computed_tokens
            stub.scheduled["prompt"] = min(left, limit - 16)
        found.append(stub.schedule().num_spec_tokens_to_schedule == 0)
        if prompt:
            prompt.num_computed_tokens += stub.scheduled["prompt"]
            prompt.is_prefill_chunk = prompt.num_computed_tokens < prompt.num_tokens - 1
            prompt = prompt if prompt.num_computed_tokens < prompt.num_tokens else None
    return found


@pytest.mark.parametrize("tokens", [700, 1000, 1500])
def test_a_flood_of_prompts_does_not_stop_drafts(tokens: int) -> None:
    """At most every other step drafts nothing, however many prompts follow each other."""
    found = steps_without_drafts([tokens] * 200, 200)
    assert sum(found) > 50
    for start in range(len(found)):
        for end in range(start + 1, len(found) + 1):
            assert 2 * sum(found[start:end]) <= end - start + QUIET_STEPS


def test_a_burst_is_served_as_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of three chunks behind each other, once a few steps have had drafts."""
    burst = steps_without_drafts([1500, 1500], 12)
    monkeypatch.setattr("vllm_graft.spec_decode.chunking.graph_fit.QUIET_STEPS", 1 << 30)
    assert steps_without_drafts([1500, 1500], 12) == burst
    assert sum(burst) == 4
    # The control: a flood would be another one.
    flood = steps_without_drafts([1500] * 20, 60)
    assert sum(flood) == 40


def test_a_scheduler_that_fails_keeps_its_limit() -> None:
    stub = scheduler([], [request(1000)])

    def schedule() -> Any:
        raise RuntimeError("no blocks")

    stub.schedule = schedule
    chunk_prompts(stub, 512, cuts=True)
    with pytest.raises(RuntimeError, match="no blocks"):
        stub.schedule()
    assert stub.max_num_scheduled_tokens == 8192


@pytest.mark.parametrize(
    ("chunked_prefill", "whole_images", "whole_blocks", "rows", "expected"),
    [
        (True, False, False, LEAST_ROWS, True),
        (True, False, False, LEAST_ROWS - 1, False),
        (False, False, False, 512, False),
        (True, True, False, 512, False),
        (True, False, True, 512, False),
    ],
)
def test_where_prompts_can_be_chunked(
    chunked_prefill: bool, whole_images: bool, whole_blocks: bool, rows: int, expected: bool
) -> None:
    stub = scheduler([], [])
    stub.need_mamba_block_aligned_split = whole_blocks
    stub.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=chunked_prefill, disable_chunked_mm_input=whole_images
        )
    )
    assert can_chunk(stub, rows) is expected


@pytest.mark.parametrize(("whole", "rows"), [(True, 0), (False, 512)])
def test_vllm_schedules_nothing_of_an_image_that_a_chunk_does_not_hold(
    whole: bool, rows: int
) -> None:
    """Its drafts look one token ahead, so that a prompt stops a token before its image."""
    place = SimpleNamespace(offset=9, length=600, get_num_embeds=lambda: 600)
    image = SimpleNamespace(mm_position=place, identifier="image")
    prompt = SimpleNamespace(has_encoder_inputs=True, mm_features=[image], request_id="a")
    stub = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=whole),
        is_encoder_decoder=False,
        encoder_cache_manager=SimpleNamespace(
            get_cached_num_encoder_embeds=lambda request, place: None,
            check_and_update_cache=lambda request, place: True,
        ),
        ec_connector=None,
        _reject_on_encoder_cache_embed_mismatch=lambda *args: False,
    )
    found = Scheduler._try_schedule_encoder_inputs(stub, prompt, 8, 512, 1024, 1)  # type: ignore[arg-type]
    assert found[1] == rows


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
