"""The choice of a tree attention kernel for a size: the rule, the points, and the report."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.cuda_graphs import recording
from tests.support.simulated_streams import simulated
from vllm_graft.base.errors import ConfigError
from vllm_graft.spec_decode.kernels.attention import e4m3
from vllm_graft.spec_decode.kernels.attention.attention_plan import AttentionWorkspace
from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.targets.dense import two_pass
from vllm_graft.spec_decode.targets.dense.two_pass import (
    MAX_KEYS,
    KernelChoice,
    Point,
    Size,
    choose,
    points,
)
from vllm_graft.spec_decode.targets.latent import latent_two_pass
from vllm_graft.spec_decode.targets.latent.own_latents import attend_own_latents
from vllm_graft.spec_decode.trees.batch import TreeBatch
from vllm_graft.spec_decode.tuning import attention_timing as crossover
from vllm_graft.spec_decode.tuning.attention_timing import Geometry, choose_kernels, measure

Times = dict[Point, dict[Any, float]]

# Microseconds per layer on an H200, 32 rows, Llama-8B's heads: the kernel's, and FlashAttention's
# for a chain (at commit 79f6bef) plus 5.
H200: Times = {
    Point(batch, 32, context): {"triton": triton, "flash": chain + 5}
    for batch, context, triton, chain in (
        (1, 2048, 14.6, 16.6),
        (1, 8192, 35.3, 23.9),
        (1, 32768, 97.8, 54.4),
        (4, 2048, 43.8, 22.6),
        (4, 8192, 97.7, 48.4),
    )
}


def test_the_smallest_worst_loss_decides() -> None:
    # At 2k the kernel is 1.48 times faster, at 32k 1.65 times slower.
    assert choose(H200, Size(1, 32)) == "flash"
    short = {point: times for point, times in H200.items() if point.context < 32768}
    assert choose(short, Size(1, 32)) == "triton"
    assert choose(short, Size(4, 32)) == "flash"


def test_a_size_goes_by_the_nearest_that_was_measured() -> None:
    times: Times = {
        Point(1, 8, 2048): {"triton": 1.0, "flash": 2.0},
        Point(1, 32, 2048): {"triton": 2.0, "flash": 1.0},
        Point(16, 8, 2048): {"triton": 1.0, "flash": 2.0},
        Point(16, 32, 2048): {"triton": 2.0, "flash": 1.0},
    }
    assert [choose(times, Size(3, rows)) for rows in (1, 8, 15, 17, 64)] == [
        *["triton"] * 3,
        *["flash"] * 2,
    ]
    # Halfway between two sizes the larger one decides.
    assert choose(times, Size(1, 16)) == "flash"
    batches: Times = {
        Point(4, 8, 2048): {"triton": 1.0, "flash": 2.0},
        Point(16, 8, 2048): {"triton": 2.0, "flash": 1.0},
    }
    assert [choose(batches, Size(batch, 8)) for batch in (1, 7, 8, 300)] == [
        *["triton"] * 2,
        *["flash"] * 2,
    ]


def test_equal_times_are_decided_alike_everywhere() -> None:
    point = Point(1, 8, 2048)
    for times in ({"triton": 1.0, "flash": 1.0}, {"flash": 1.0, "triton": 1.0}):
        assert choose({point: times}, Size(1, 8)) == "flash"  # type: ignore[dict-item]


def test_points() -> None:
    found = points({32, 5, 7, 10, 20}, 32, 40000)
    assert {point.rows for point in found} == {5, 10, 32}
    assert {point.num_reqs for point in found} == {1, 4, 16, 32}
    assert {point.context for point in found} == {512, 2048, 8192, 32768}
    assert len(set(found)) == len(found) <= 48
    assert all(p.num_reqs * p.context <= MAX_KEYS or p.context == 512 for p in found)


@pytest.mark.parametrize(
    ("max_reqs", "longest", "batches", "contexts"),
    [
        (1, 256, {1}, {256}),
        (1, 512, {1}, {512}),
        (3, 4096, {1, 3}, {512, 2048}),
        (2000, 8192, {1, 4, 16, 64}, {512, 2048, 8192}),
    ],
)
def test_points_of_small_engines(
    max_reqs: int, longest: int, batches: set[int], contexts: set[int]
) -> None:
    found = points({32}, max_reqs, longest)
    assert {point.num_reqs for point in found} == batches
    assert {point.context for point in found} == contexts
    # Every size has its points.
    assert {point.size for point in found} == {Size(batch, 32) for batch in batches}


def test_a_choice_keeps_to_what_was_asked() -> None:
    assert KernelChoice("flash", costs=H200).of(1, 1) == "flash"
    assert KernelChoice("triton", costs=H200).of(4, 32) == "triton"
    assert KernelChoice("auto", why="no FlashAttention").of(4, 32) == "triton"


def test_report() -> None:
    choice = KernelChoice("auto", costs={Point(4, 32, 2048): {"triton": 43.84, "flash": 27.5}})
    assert choice.of(4, 32) == choice.of(4, 32) == "flash"
    choice.declined += 1
    assert choice.report() == {
        "asked": "auto",
        "why": "",
        "microseconds": [
            {"num_reqs": 4, "rows": 32, "context": 2048, "triton": 43.8, "flash": 27.5}
        ],
        "used": {"4x32": "flash"},
        "declined": 1,
    }


def make_layer(backend: str = "FLASH_ATTN", version: int = 3, heads: int = 4) -> Any:
    impl = SimpleNamespace(
        vllm_flash_attn_version=version, batch_invariant_enabled=False, kv_cache_dtype="auto"
    )
    named = SimpleNamespace(get_name=lambda: backend)
    sizes = {"num_heads": heads, "num_kv_heads": 2, "head_size": 64}
    return SimpleNamespace(impl=impl, get_attn_backend=lambda: named, **sizes)


def decide(layers: dict[str, Any], asked: Any) -> list[KernelChoice]:
    return choose_kernels(
        layers,
        asked,
        list(H200),
        SimpleNamespace(multiprocessors=132),  # type: ignore[arg-type]
        max_model_len=40000,
        dtype=torch.bfloat16,
        block_size=16,
        device=torch.device("cpu"),
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Geometry]:
    geometries: list[Geometry] = []

    def measure(geometry: Geometry, where: Any, *args: Any) -> Times:
        geometries.append(geometry)
        return {point: H200[point] for point in where}

    monkeypatch.setattr(crossover, "measure", measure)
    return geometries


def test_layers_of_a_geometry_are_measured_once(measured: list[Geometry]) -> None:
    layers = {"a": make_layer(), "b": make_layer(), "c": make_layer(heads=8)}
    choices = decide(layers, "auto")
    assert measured == [
        Geometry(4, 2, 64, torch.bfloat16, False, 16),
        Geometry(8, 2, 64, torch.bfloat16, False, 16),
    ]
    impls = [layer.impl for layer in layers.values()]
    assert impls[0].two_pass is impls[1].two_pass
    assert [impl.two_pass.choice for impl in impls[1:]] == choices
    assert choices[0].of(4, 32) == "flash"


def test_nothing_is_measured_where_there_is_no_choice(measured: list[Geometry]) -> None:
    [choice] = decide({"a": make_layer("TRITON_ATTN"), "b": make_layer("TRITON_ATTN")}, "auto")
    assert choice.of(4, 32) == "triton"
    assert choice.why == "the attention backend is TRITON_ATTN, not FLASH_ATTN"
    [choice] = decide({"a": make_layer("TRITON_ATTN")}, "triton")
    assert (choice.of(4, 32), choice.why) == ("triton", "")
    [choice] = decide({"a": make_layer()}, "flash")
    assert choice.of(1, 1) == "flash"
    assert not measured


def test_flash_that_is_not_there_is_refused(measured: list[Geometry]) -> None:
    with pytest.raises(ConfigError) as caught:
        decide({"a": make_layer(), "model.layers.1": make_layer(version=2)}, "flash")
    assert str(caught.value) == (
        "--additional-config.graft.tree.attention is 'flash', but layer model.layers.1 can't have "
        "it: vLLM uses FlashAttention 2 here, not 3. Set it to 'auto' or 'triton'"
    )


def test_times_that_cannot_be_taken_leave_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*args: Any) -> Times:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(crossover, "measure", measure)
    [choice] = decide({"a": make_layer()}, "auto")
    assert choice.of(4, 32) == "triton"
    assert choice.why == "FlashAttention 3 could not be timed here: no room"


@pytest.mark.parametrize("fp8", [False, True])
def test_problems_have_even_rows(fp8: bool) -> None:
    geometry = Geometry(4, 2, 64, torch.float16, fp8, 16)
    problem = geometry.problem(Point(3, 5, 40), "cpu")
    assert problem.query.shape == (15, 4, 64)
    assert problem.query_start_loc.tolist() == [0, 5, 10, 15]
    assert problem.seq_lens.tolist() == [40, 40, 40]
    assert problem.row_masks.shape == (15,)
    assert (problem.row_masks[5:10] == problem.row_masks[:5]).all()
    assert (problem.k_scale is not None) == fp8


@pytest.mark.parametrize("taken", [False, True])
def test_queries_are_timed_as_an_engine_has_them(
    taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e4m3, "MEASURED", (9, 0) if taken else None)
    batches: list[TreeBatch] = []
    monkeypatch.setattr(
        crossover, "tree_attention", lambda batch, out, *, workspace: batches.append(batch)
    )
    space = AttentionWorkspace.allocate(1, 5, 4, 64, 4, "cpu")
    for fp8 in (True, False):
        problem = Geometry(4, 2, 64, torch.float16, fp8, 16).problem(Point(1, 5, 40), "cpu")
        crossover.triton_call(problem, replace(space, capability=(9, 0)), 64)()
    small, plain = batches
    assert small.query.dtype == (torch.float8_e4m3fn if taken else torch.float16)
    assert (small.q_scale is not None) == taken
    assert plain.query.dtype == torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a CUDA device")
@pytest.mark.parametrize(
    ("geometry", "owner", "own"),
    [
        (Geometry(2, 1, 16, torch.bfloat16, False, 16), two_pass, attend_own_rows),
        (Geometry(2, 1, 16, torch.bfloat16, True, 16), two_pass, attend_own_rows),
        (
            latent_two_pass.LatentGeometry(2, 32, 16, torch.bfloat16, 16),
            latent_two_pass,
            attend_own_latents,
        ),
    ],
)
def test_measurement_on_stand_ins(
    geometry: Any, owner: Any, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kernels are captured and replayed; the GPU test looks at the times."""
    plans: list[torch.Tensor] = []
    latent, fp8 = owner is latent_two_pass, getattr(geometry, "fp8", False)

    def first_pass(batch: Any, *, plan: torch.Tensor, multiprocessors: int) -> Any:
        query = batch.query
        assert plan is plans[-1]
        assert (query.dtype == torch.float8_e4m3fn) == fp8
        assert latent or fp8 == (batch.q_scale is not None)
        dtype = query.dtype if latent else torch.float32
        return torch.zeros(query.shape, dtype=dtype), torch.zeros(query.shape[1::-1])

    def plan(batch: Any, **given: Any) -> torch.Tensor:
        assert batch.max_seq_len == 64
        plans.append(batch.prefix_lens.clone())
        return plans[-1]

    name = "LATENT_PASSES" if latent else "PLAIN_PASSES"
    monkeypatch.setattr(owner, name, two_pass.Passes(plan, first_pass, own))
    where = [Point(1, 3, 20), Point(1, 3, 40), Point(2, 3, 40)]
    space = AttentionWorkspace.allocate(2, 3, 2, 32, 4, "cpu")
    with recording(), simulated():
        costs = measure(geometry, where, space, 64, "cpu")
    assert list(costs) == where
    assert all(times.keys() == {"triton", "flash"} for times in costs.values())
    assert [lens.tolist() for lens in plans[::2]] == [[17], [37], [37, 37]]
