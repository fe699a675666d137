"""The connector in real engines gives the same tokens as the same engines without it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.cache_engines import (
    connector,
    generate,
    metrics,
    prompts,
    stored,
    transfer,
)
from tests.support.engines.recorded_engine import recorded_engine
from vllm_graft.base.errors import ConfigError
from vllm_graft.hicache.messages.operation import Direction
from vllm_graft.hicache.pages.pool_shape import least_page_bytes
from vllm_graft.hicache.storage.segments import store
from vllm_graft.testing import cpu_engine, model_runner

pytestmark = pytest.mark.engine

PROMPTS = prompts(1, 200, 100, 65, 33)
HITS, NONE = [192, 96, 64, 32], [0, 0, 0, 0]
HYBRID_PROMPTS = prompts(2, 300, 130, 70)
HYBRID_HITS = [288, 128, 64]
HYBRID: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": True}


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    with cpu_engine(llama) as llm:
        return generate(llm, PROMPTS)[0]


def _worker(llm: Any) -> Any:
    return model_runner(llm).kv_connector.kv_connector.worker


def _is_idle(llm: Any) -> bool:
    scheduler = connector(llm).scheduler
    held = [page for page in scheduler.index._pages.values() if page.holds]
    return not scheduler.busy and not held


def test_async_loads(llama: Path, expected: list[list[int]]) -> None:
    with cpu_engine(llama, kv_transfer_config=transfer(load="async")) as llm:
        assert generate(llm, PROMPTS) == (expected, NONE)
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == (expected, HITS)
        assert _is_idle(llm)
        # The frontend's lower bound is no more than the real size of a page.
        slot_bytes = _worker(llm)._geometry.shape.slot_bytes
        assert 0 < least_page_bytes(llm.llm_engine.vllm_config, None) <= slot_bytes
        counted = metrics(llm)
        assert counted["loads_async"] == 4
        assert counted["hit_tokens_host"] == 384

        _check_poison(llm, expected)
        _check_failed_loads(llm, expected)
        _check_abort_in_mid_load(llm, expected)

        # A reset of the connector forgets pages in host memory too.
        assert llm.reset_prefix_cache(reset_connector=True)
        assert generate(llm, PROMPTS) == (expected, NONE)
        assert _is_idle(llm)


def _check_poison(llm: Any, expected: list[list[int]]) -> None:
    """Check that loaded KV is really used: other bytes in host memory give other tokens."""
    assert llm.reset_prefix_cache()
    pool, shape = _worker(llm)._pool, _worker(llm)._geometry.shape
    for page in connector(llm).scheduler.index._pages.values():
        pool.page(0, page.slot, shape.slot_bytes)[::7] = b"\x3f" * len(
            range(0, shape.slot_bytes, 7)
        )
    tokens, cached = generate(llm, PROMPTS)
    assert cached == HITS
    assert tokens != expected
    assert llm.reset_prefix_cache(reset_connector=True)


def _check_failed_loads(llm: Any, expected: list[list[int]]) -> None:
    """Check that failed loads are recomputed, and their keys forgotten."""
    assert generate(llm, PROMPTS)[0] == expected
    assert llm.reset_prefix_cache()
    steps = 0
    core = llm.llm_engine.engine_core.engine_core
    schedule = core.scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal steps
        steps += 1
        return schedule(*args, **kwargs)

    core.scheduler.schedule = counted
    try:
        with _broken_loads(_worker(llm).engine):
            tokens, _ = generate(llm, PROMPTS)
    finally:
        core.scheduler.schedule = schedule
    assert tokens == expected
    assert steps < 100
    assert metrics(llm)["failed_loads"] == 4
    assert _is_idle(llm)
    # The pages were stored again, and can be loaded.
    assert llm.reset_prefix_cache()
    assert generate(llm, PROMPTS) == (expected, HITS)


def _check_abort_in_mid_load(llm: Any, expected: list[list[int]]) -> None:
    """Check that a request that ends while it is loaded gives its blocks back after the load."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    engine, held = _worker(llm).engine, []
    stock = engine.finished

    def late() -> list[Any]:
        held.extend(stock())
        return []

    engine.finished = late
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.llm_engine.add_request("abort-me", PROMPTS[0], params)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for _ in range(3):
        llm.llm_engine.step()
    (request,) = scheduler.requests.values()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    llm.llm_engine.abort_request(["abort-me"])
    assert request.is_finished()
    llm.llm_engine.step()
    assert list(scheduler.requests.values()) == [request], "its blocks are being written"
    assert connector(llm).scheduler.busy, "the copy is still in flight"
    engine.finished = stock
    engine._results += held
    core = llm.llm_engine.engine_core.engine_core
    for _ in range(3):
        core.step_fn()
    assert not scheduler.requests, "its blocks were freed"
    assert _is_idle(llm)
    assert llm.reset_prefix_cache()
    assert generate(llm, PROMPTS) == (expected, HITS)


def test_layerwise_loads_and_async_scheduling(llama: Path, expected: list[list[int]]) -> None:
    options = transfer(load="layerwise")
    with cpu_engine(llama, kv_transfer_config=options, async_scheduling=True) as llm:
        assert generate(llm, PROMPTS)[0] == expected
        for _ in range(2):
            assert llm.reset_prefix_cache()
            assert generate(llm, PROMPTS) == (expected, HITS)
        assert metrics(llm)["loads_layerwise"] == 8
        _check_early(llm, expected)


def _check_early(llm: Any, expected: list[list[int]]) -> None:
    """Check that loads begin once, before vLLM prepares the inputs of their step."""
    worker, runner = _worker(llm), model_runner(llm)
    counted = worker.counters()
    assert counted["early_loads"] == counted["layerwise_steps"] > 0
    order: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (worker.engine, "begin_step"),
            (worker.engine, "load_layers"),
            (worker.engine, "load_now"),
            (runner, "prepare_inputs"),
        ):
            stock = getattr(owner, name)

            def noted(*args: Any, name: str = name, stock: Any = stock, **kwargs: Any) -> Any:
                order.append(name)
                return stock(*args, **kwargs)

            patch.setattr(owner, name, noted)
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS[:1]) == (expected[:1], [192])
    # On a CPU `load_layers` calls `load_now`. The next step begins as usual, with its forward pass.
    loading = ["begin_step", "load_layers", "load_now", "prepare_inputs"]
    assert order[:6] == [*loading, "prepare_inputs", "begin_step"]
    assert order.count("load_layers") == 1


def test_full_graphs(llama: Path) -> None:
    """A hit that leaves one token runs in a FULL graph, where no hook does."""
    batch = prompts(7, 97, 65)
    with recorded_engine(llama, graphs=[4], max_num_seqs=4) as llm:
        tokens = generate(llm, batch, 4)[0]
    with recorded_engine(
        llama, graphs=[4], max_num_seqs=4, kv_transfer_config=transfer(load="layerwise")
    ) as llm:
        assert generate(llm, batch, 4)[0] == tokens
        waits: list[bool] = []
        worker = _worker(llm)
        stock = worker.start_loads

        def start(metadata: Any, hooks_run: bool) -> None:
            if metadata.sync_loads:
                waits.append(hooks_run)
            stock(metadata, hooks_run)

        worker.start_loads = start
        assert llm.reset_prefix_cache()
        assert generate(llm, batch, 4) == (tokens, [96, 64])
        assert waits == [False], "both requests' loads, in one step of a FULL graph"
        assert worker.counters()["early_loads"] == 1


def test_eviction_and_preemption(llama: Path) -> None:
    """Host memory has 6 pages, device memory 12 blocks: both are too small."""
    batch = prompts(3, 100, 90, 95, 64)
    with cpu_engine(llama) as llm:
        tokens = generate(llm, batch, 60)[0]
    options = transfer(load="async", host_bytes=6 * 32768, write_policy="write_through")
    with cpu_engine(llama, kv_transfer_config=options, num_gpu_blocks_override=12) as llm:
        for _ in range(3):
            assert generate(llm, batch, 60)[0] == tokens
            llm.reset_prefix_cache()
        assert metrics(llm)["evictions"] > 0
        preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
        assert preempted[0] > 0
        assert _is_idle(llm)


@pytest.mark.parametrize("load", ["async", "layerwise"])
@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_hybrid(kind: str, load: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    with cpu_engine(model, kv_transfer_config=transfer(load=load), **HYBRID) as llm:
        # The first round has nothing to load, so it is the reference.
        tokens, cached = generate(llm, HYBRID_PROMPTS)
        assert cached == [0, 0, 0]
        assert llm.reset_prefix_cache()
        assert generate(llm, HYBRID_PROMPTS) == (tokens, HYBRID_HITS)
        assert llm.reset_prefix_cache()
        assert generate(llm, [*HYBRID_PROMPTS, *prompts(9, 40)])[0][:3] == tokens
        counted = _worker(llm).counters()
        assert bool(counted.get("layerwise_steps")) == (load != "async")
        # vLLM moves recurrent states while it prepares a step, so nothing is loaded before that.
        early = 0 if kind == "recurrent" else counted.get("layerwise_steps", 0)
        assert counted.get("early_loads", 0) == early


@pytest.mark.usefixtures("reads_pay")
@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_hybrid_restart(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A new engine reads what the last one has stored, and the same tokens come out."""
    model = request.getfixturevalue(kind)
    options = transfer(**stored(tmp_path))
    with cpu_engine(model, **HYBRID) as llm:
        tokens = generate(llm, HYBRID_PROMPTS)[0]
    with cpu_engine(model, kv_transfer_config=options, **HYBRID) as llm:
        assert generate(llm, HYBRID_PROMPTS) == (tokens, [0, 0, 0])
    with cpu_engine(model, kv_transfer_config=options, **HYBRID) as llm:
        assert generate(llm, HYBRID_PROMPTS) == (tokens, HYBRID_HITS)
        assert metrics(llm)["hit_tokens_storage"] == 480
        assert llm.reset_prefix_cache(reset_connector=True)
        assert generate(llm, HYBRID_PROMPTS) == (tokens, [0, 0, 0])


def test_write_policies(llama: Path, expected: list[list[int]]) -> None:
    """Selective keeps pages from the second request on, write-back when requests have ended."""
    options = transfer(load="async", write_policy="write_through_selective")
    with cpu_engine(llama, kv_transfer_config=options) as llm:
        for cached in (NONE, NONE, HITS):
            assert generate(llm, PROMPTS) == (expected, cached)
            assert llm.reset_prefix_cache()
    options = transfer(load="async", write_policy="write_back")
    with cpu_engine(llama, kv_transfer_config=options) as llm:
        assert generate(llm, PROMPTS[:2]) == (expected[:2], [0, 0])
        llm.llm_engine.engine_core.engine_core.step_fn()
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS[:2]) == (expected[:2], [192, 96])


def test_failed_loads_end_requests_where_vllm_is_told_so(
    llama: Path, expected: list[list[int]]
) -> None:
    options = {**transfer(load="async"), "kv_load_failure_policy": "fail"}
    with cpu_engine(llama, kv_transfer_config=options) as llm:
        assert generate(llm, PROMPTS)[0] == expected
        assert llm.reset_prefix_cache()
        with _broken_loads(_worker(llm).engine):
            outputs = llm.generate(PROMPTS, use_tqdm=False)
        assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 4
        # Blocks of failed requests were not kept.
        llm.llm_engine.engine_core.engine_core.step_fn()
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == (expected, NONE)
        report = llm.collective_rpc("graft_info")[0]
        assert report["parts"] == ["hicache"]
        assert report["counters"]["hicache"]["failed_loads"] == 4


def test_a_misspelt_key_stops_the_engine(llama: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"extra_config\.host_byte: unknown key. Did you mean"),
        cpu_engine(llama, kv_transfer_config=transfer(host_byte=1)),
    ):
        pass


def test_storage_in_which_no_page_fits_stops_the_engine(
    sliding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds where the page's size is only known when the model is loaded."""
    # Of the least segment 8,064 bytes are left for a page, which the frontend takes for enough.
    monkeypatch.setattr(store, "bytes_alone", lambda length: length + 57_472)
    storage = {"backend": "segments", "path": str(tmp_path), "max_bytes": "1MiB"}
    storage["segment_bytes"] = "64KiB"
    words = r"extra_config\.storage\.segment_bytes is 65536, so a segment has 65536 bytes, but"
    with (
        pytest.raises(ConfigError, match=words),
        cpu_engine(sliding, kv_transfer_config=transfer(storage=storage), **HYBRID),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_failed_layerwise_loads(llama: Path, expected: list[list[int]]) -> None:
    """They are tried again within the step; if that fails too, only their requests end."""
    options = {**transfer(load="layerwise"), "kv_load_failure_policy": "fail"}
    from vllm import SamplingParams

    other = prompts(11, 20)  # It is shorter than a block, so nothing of it is loaded.
    with cpu_engine(llama, kv_transfer_config=options, async_scheduling=True) as llm:
        assert generate(llm, PROMPTS)[0] == expected
        alone = generate(llm, other)[0]
        assert llm.reset_prefix_cache()
        engine = _worker(llm).engine
        with _broken_loads(engine, times=1):
            assert generate(llm, PROMPTS) == (expected, HITS)
        assert engine.second_tries == 1
        assert metrics(llm).get("failed_loads", 0) == 0

        assert llm.reset_prefix_cache()
        with _broken_loads(engine):
            outputs = llm.generate(
                [*PROMPTS, *other], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False
            )
        reasons = [output.outputs[0].finish_reason for output in outputs]
        assert reasons == ["error"] * 4 + ["length"]
        assert not any(output.outputs[0].token_ids for output in outputs[:4])
        assert list(outputs[4].outputs[0].token_ids) == alone[0]
        assert metrics(llm)["failed_loads"] == 4
        # Neither the device nor the host keeps these blocks.
        for _ in range(2):
            llm.llm_engine.engine_core.engine_core.step_fn()
        assert generate(llm, PROMPTS) == (expected, NONE)
        assert llm.reset_prefix_cache()
        assert generate(llm, PROMPTS) == (expected, HITS)
        assert _is_idle(llm)


@contextlib.contextmanager
def _broken_loads(engine: Any, times: int = 10**9) -> Iterator[None]:
    """Let the first ``times`` copies to the device fail."""
    stock, left = engine._copies, times

    def broken(operation: Any) -> Any:
        nonlocal left
        if operation.direction is Direction.LOAD and left:
            left -= 1
            raise OSError("injected")
        return stock(operation)

    engine._copies = broken
    try:
        yield
    finally:
        engine._copies = stock
