"""The runner's lifecycle, what it declines, and its budget, with the fake back end."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.vision import towers
from tests.support.vision.fake_backend import FakeBackend
from vllm_graft.base.errors import ConfigError, GraftError
from vllm_graft.graph_runners.vision.capture.device_memory import scratch_bytes, segment_bytes
from vllm_graft.graph_runners.vision.runner import ViTCudaGraphRunner
from vllm_graft.graph_runners.vision.towers.adapter import FixedSizeAdapter, adapter_of, attach

SMALL = {"max_patches": 256, "buckets": [64, 128, 256], "capture_share": 1}


@pytest.fixture(scope="module", params=["qwen3"])
def kind(request: pytest.FixtureRequest, rank: None) -> str:
    return str(request.param)


def test_lifecycle(kind: str, model: Any) -> None:
    runner = towers.make_runner(model, SMALL, capture=False)
    inputs = towers.batch(kind, [(1, 8, 8)])
    assert runner.get_num_graphs_to_capture() == 3
    assert runner.token_budgets[-1] > 0
    assert not runner.is_captured()
    assert runner.execute(inputs) is None
    assert runner.stats.declines == {"not_captured": 1}
    runner.capture(graph_pool="pool")
    assert runner.is_captured()
    backend: Any = runner.store.backend
    # vLLM's memory profile sees the whole budget.
    assert backend.held + runner.store.budget.used == 512 << 20
    assert runner.execute(inputs) is not None
    assert backend.held == 0
    runner.clear()
    assert not runner.is_captured()
    assert runner.store.budget.used == 0
    assert runner.execute(inputs) is None
    runner.capture(graph_pool="another")
    assert runner.execute(inputs) is not None
    # The second batch of a layout is answered by the eager pass, and then captured.
    assert (runner.graph_hits, runner.graph_misses) == (1, 1)


def test_outputs_are_nobodys_buffer(kind: str, model: Any) -> None:
    runner = towers.make_runner(model, SMALL)
    inputs = [towers.batch(kind, [(1, 8, 8)] * n, seed=n) for n in (1, 2, 3)]
    for _ in range(4):
        kept = [(runner.execute(batch), towers.eager(model, batch)) for batch in inputs]
        assert all(towers.agree(*pair) for pair in kept)
    pointers = {part.untyped_storage().data_ptr() for found, _ in kept for part in found or ()}
    assert len(pointers) == 6
    for buffer in runner.store.arena._buffers.values():
        assert buffer.untyped_storage().data_ptr() not in pointers
    assert runner.stats.items["exact"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: {"image_embeds": 0, "image_grid_thw": x["image_grid_thw"]}, "precomputed"),
        (lambda x: {**x, "video_grid_thw": x["image_grid_thw"]}, "mixed_modalities"),
        (lambda x: {**x, "pixel_values": list(x["pixel_values"])}, "not_one_tensor"),
        (lambda x: {**x, "pixel_values": x["pixel_values"][:-4]}, "rows_mismatch"),
        (lambda x: towers.batch("qwen3", [(1, 16, 32)]), "too_large"),
        (lambda x: towers.batch("qwen3", [(1, 8, 8)] * 5), "too_large"),
        (lambda x: towers.batch("qwen3", [(60, 2, 2)], "video"), "segments"),
    ],
)
def test_declines(kind: str, model: Any, change: Any, reason: str) -> None:
    runner = towers.make_runner(model, SMALL)
    assert runner.execute(change(towers.batch(kind, [(1, 8, 8)]))) is None
    assert runner.report()["declines"] == {reason: 1}
    assert runner.report()["failures"] == []


def test_pixels_of_another_dtype(kind: str, model: Any) -> None:
    """Buckets do not take another dtype than they were captured with, but exact graphs do."""
    runner = towers.make_runner(model, SMALL)
    inputs = towers.batch(kind, [(1, 8, 8)])
    inputs["pixel_values"] = inputs["pixel_values"].double()
    assert runner.execute(inputs) is None
    assert towers.right(runner, inputs)
    assert towers.right(runner, inputs)
    assert runner.stats.items["exact"] == 1


def test_a_pruned_or_adapted_model_is_declined(kind: str, rank: None) -> None:
    model = towers.make_model(kind)
    model.is_multimodal_pruning_enabled = True
    runner = towers.make_runner(model, SMALL)
    assert not runner.supports_modality("image")
    assert runner.stats.declines == {"modality": 1}
    model.is_multimodal_pruning_enabled = False
    for obstacle, prepare in {
        "tower_lora": lambda config: setattr(
            config, "lora_config", SimpleNamespace(enable_tower_connector_lora=True)
        ),
        "fp8_dynamic_scales": lambda config: [
            setattr(layer, "_fp8_dynamic_scale", True)
            for layer in model.modules()
            if type(layer).__name__ == "MMEncoderAttention"
        ],
    }.items():
        config = towers.make_config(SMALL)
        prepare(config)
        runner = towers.runner_of(model, config)
        runner.capture("pool")
        assert runner.execute(towers.batch(kind, [(1, 8, 8)])) is None
        assert runner.report()["declines"] == {obstacle: 1}
        assert runner.report()["graphs"] == {"exact": 0, "bucket": 0}


def test_sdpa_reads_lengths_on_the_host(kind: str, model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(FakeBackend, "reads_device", False)
    runner = towers.make_runner(model, SMALL)
    assert runner.execute(towers.batch(kind, [(1, 8, 8)])) is None
    assert runner.report()["declines"] == {"torch_sdpa": 1}


def test_ranks_that_agree_capture_at_the_start_only(
    kind: str, model: Any, monkeypatch: Any
) -> None:
    config = towers.make_config(SMALL)
    config.parallel_config.tensor_parallel_size = 2
    runner = towers.runner_of(model, config)
    # The other rank keeps all buckets but the largest.
    others = iter([True, False, True, True, True])
    asked: list[bool] = []
    monkeypatch.setattr(
        runner.startup, "agree", lambda ok: asked.append(ok) or (ok and next(others))
    )
    runner.capture("pool")
    assert asked == [True] * 5
    assert sorted(runner.store.buckets) == [64, 128]
    assert runner.stats.dropped == {"other_rank": 1}
    assert runner.router.rate.share == 0
    assert not runner.store.rules.timing
    for _ in range(5):
        assert runner.execute(towers.batch(kind, [(1, 8, 8)])) is not None
    assert runner.stats.items == {"bucket": 5}


def test_the_budget_evicts_the_colder(kind: str, model: Any) -> None:
    runner = towers.make_runner(model, {**SMALL, "buckets": []})
    shapes = [[(1, 8, 8)], [(1, 4, 16)], [(1, 16, 4)], [(1, 2, 32)]]
    assert towers.prewarm(runner, towers.batch(kind, shapes[0]))
    (graph,) = runner.store.exact.values()
    # There is room for one more graph, and for the bytes that are never given away.
    runner.store.budget.limit = int((runner.store.budget.used + 2 * sum(graph.own)) / 0.97)
    for turn in range(40):
        shape = shapes[turn % 2] if turn < 20 else shapes[2 + turn % 2]
        inputs = towers.batch(kind, shape, seed=turn)
        found = runner.execute(inputs)
        assert found is None or towers.agree(found, towers.eager(model, inputs))
        assert runner.store.budget.free >= 0
    report = runner.report()
    assert report["items"]["exact"] > 10
    assert report["dropped"].get("no_room", 0) + report["dropped"].get("evicted", 0) > 0
    assert report["bytes"] <= report["bytes_limit"]


def let_the_pool_grow(runner: ViTCudaGraphRunner, monkeypatch: Any) -> None:
    """Let each further capture take a gigabyte."""
    backend: Any = runner.store.backend
    honest = backend.reserved
    monkeypatch.setattr(backend, "reserved", lambda: honest() + backend.captures * 10**9)


def test_a_pool_that_outgrows_its_budget_goes(kind: str, model: Any, monkeypatch: Any) -> None:
    runner = towers.make_runner(model, {**SMALL, "buckets": [64]})
    store = runner.store
    towers.prewarm(runner, towers.batch(kind, [(1, 8, 8)]))
    assert (len(store.exact), len(store.buckets)) == (1, 1)
    let_the_pool_grow(runner, monkeypatch)
    inputs = towers.batch(kind, [(1, 4, 16)])
    assert list(towers.prewarm(runner, inputs).values()) == ["memory"]
    monkeypatch.undo()
    report = runner.report()
    assert report["dropped"] == {"overflow": 2, "memory": 1}
    assert report["graphs"] == {"exact": 0, "bucket": 0}
    assert 0 <= report["bytes"] <= report["bytes_limit"]
    assert report["bytes"] == sum(report["bytes_of"].values())
    # The next capture gets an empty pool, and estimates have a larger margin than before.
    assert store.memory.margin > 1.1
    other = towers.batch(kind, [(1, 16, 4)])
    assert list(towers.prewarm(runner, other).values()) == ["captured"]
    assert towers.right(runner, other)


def test_ranks_in_lockstep_keep_what_others_do(kind: str, model: Any, monkeypatch: Any) -> None:
    runner = towers.make_runner(model, {**SMALL, "buckets": [64]})
    runner.store.rules.lockstep = True
    let_the_pool_grow(runner, monkeypatch)
    assert list(towers.prewarm(runner, towers.batch(kind, [(1, 4, 16)])).values()) == ["memory"]
    assert sorted(runner.store.buckets) == [64]
    assert runner.stats.dropped == {"memory": 1}


def test_a_budget_for_the_overhead_alone(kind: str, model: Any, monkeypatch: Any) -> None:
    runner = towers.make_runner(model, {**SMALL, "memory": 32}, capture=False)
    monkeypatch.setattr(type(runner.store.backend), "overhead", 32 << 20)
    message = r"graft\.vit\.memory=32: cuBLAS takes 32 MiB .* leaves 0 MiB, .* at least 64"
    with pytest.raises(ConfigError, match=message):
        runner.capture("pool")
    assert not runner.is_captured()


class _Allocations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func).split(".")[1] in ("zeros", "clone", "new_full"):
            self.sizes.append(found.nbytes)
        return found


class Segmented(FakeBackend):
    """Takes memory in segments as CUDA's allocator does, with a second pool for static buffers."""

    pools_static = True
    overhead = 32 << 20

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.reserved_static = 0
        self._sizes: list[int] = []

    def reserved(self) -> int:
        return self.overhead + scratch_bytes(super().reserved()) + self.reserved_static

    def close(self) -> None:
        super().close()
        self._sizes.clear()
        self.reserved_static = 0

    @contextlib.contextmanager
    def static(self) -> Iterator[None]:
        with _Allocations() as seen:
            yield
        self._sizes += seen.sizes
        self.reserved_static = segment_bytes(self._sizes)


@pytest.mark.parametrize(("memory", "buckets"), [(64, [128]), (40, [])])
def test_memory_in_segments(kind: str, model: Any, memory: int, buckets: list[int]) -> None:
    config = towers.make_config({**SMALL, "memory": memory, "buckets": [128]})
    runner = towers.runner_of(model, config, Segmented)
    runner.capture("pool")
    assert runner.report()["bytes_of"]["overhead"] == 32 << 20
    assert sorted(runner.store.buckets) == buckets
    for turn in range(40):
        grids = [[(1, 8, 8)], [(1, 4, 16)], [(1, 4, 4), (1, 4, 6)], [(1, 2, 2 + turn % 7 * 2)]]
        inputs = towers.batch(kind, grids[turn % 4], seed=turn)
        found = runner.execute(inputs)
        assert found is None or towers.agree(found, towers.eager(model, inputs))
        report = runner.report()
        assert report["bytes"] <= memory << 20, report
        assert report["bytes_of"]["static"] == runner.store.backend.reserved_static
    assert report["failures"] == []
    assert report["items"]["exact"] > 5, report
    assert (report["items"].get("bucket", 0) > 5) == bool(buckets), report


def test_a_failed_capture_costs_the_key_its_graph(kind: str, model: Any, monkeypatch: Any) -> None:
    runner = towers.make_runner(model, {**SMALL, "buckets": []})

    fail = mock.Mock(side_effect=RuntimeError("operation not permitted when capturing"))
    monkeypatch.setattr(runner.store.backend, "capture", fail)
    inputs = towers.batch(kind, [(1, 8, 8)])
    expected = towers.eager(model, inputs)
    answers = [runner.execute(inputs) for _ in range(4)]
    assert [found is None for found in answers] == [True, False, True, True]
    assert towers.agree(answers[1], expected, exact=True)
    report = runner.report()
    assert report["dropped"] == {"error": 1}
    assert "not permitted" in report["failures"][0]


def test_a_failed_replay_is_the_engines(kind: str, model: Any, monkeypatch: Any) -> None:
    runner = towers.make_runner(model, SMALL)

    fail = mock.Mock(side_effect=RuntimeError("an illegal value"))
    monkeypatch.setattr(runner.store, "replay", fail)
    assert runner.execute(towers.batch(kind, [(1, 8, 8)])) is None
    report = runner.report()
    assert report["declines"] == {"error": 1}
    assert report["failures"] == ["RuntimeError: an illegal value"]


def test_a_graph_that_is_not_faster_is_dropped(kind: str, model: Any, monkeypatch: Any) -> None:
    runner = towers.make_runner(model, {**SMALL, "buckets": []})
    seconds = iter([1.5, 0.99, 1.0])  # The first eager pass also loads kernels.
    monkeypatch.setattr(runner.store.backend, "timed", lambda region: (region(), next(seconds)))
    inputs, key = towers.batch(kind, [(1, 8, 8)]), ("image", 1, 8, 8, "torch.float32")
    assert towers.prewarm(runner, inputs) == {(key, 1): "no_gain"}
    monkeypatch.undo()
    runner.store.buckets[64] = None  # type: ignore[assignment]  # It is never replayed.
    assert towers.prewarm(runner, inputs) == {(key, 1): "no_gain"}
    assert runner.execute(inputs) is None
    assert runner.stats.declines == {"no_gain": 1}
    runner.store.buckets.clear()
    assert towers.prewarm(runner, towers.batch(kind, [(1, 8, 8)] * 5)) == {
        (key, 4): "captured",
        (key, 1): "no_gain",
    }


class Sum(FixedSizeAdapter):
    image_size = (3, 8, 8)
    patch_size = 4

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.flatten(1).cumsum(1)[:, None, :4] * self.model.weight


class Text(torch.nn.Module):
    """A model that does not speak the protocol."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)

    def embed_multimodal(self, pixel_values: torch.Tensor) -> Any:
        return pixel_values.flatten(1).cumsum(1)[:, None, :4] * self.weight


def test_an_adapter_makes_a_tower(rank: None) -> None:
    model = Text()
    config = towers.make_config(SMALL)
    config.model_config.dtype = torch.float32
    attach(model, Sum(model, config))
    assert isinstance(adapter_of(model), Sum)
    with pytest.raises(GraftError, match="needs no adapter"):
        attach(model, Sum(model, config))
    with pytest.raises(GraftError, match="vision adapter of vllm-graft"):
        model.encoder_cudagraph_forward({})  # type: ignore[operator]
    runner = towers.runner_of(model, config)
    runner.capture("pool")
    assert runner.get_num_graphs_to_capture() == 4
    assert runner.report()["graphs"] == {"exact": 4, "bucket": 0}
    for number in (1, 5, 8):
        pixels = torch.randn(number, 3, 8, 8)
        assert towers.right(runner, {"pixel_values": pixels}, exact=True)
    assert runner.execute({"pixel_values": [pixels]}) is None
    assert runner.execute({"image_embeds": pixels}) is None
    assert runner.report()["declines"] == {"not_one_tensor": 1, "precomputed": 1}
    assert runner.report()["items"] == {"exact": 14}
