"""FlashAttention 3 and the second pass, compiled: eager, planned, and in replayed graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.crossover import Geometry, measure
from vllm_graft.spec_decode.kernels.attention import AttentionWorkspace
from vllm_graft.spec_decode.kernels.problems import AttentionShape, tree_problem
from vllm_graft.spec_decode.reference_attention import (
    prefix_attention_reference,
    tree_attention_reference,
)
from vllm_graft.spec_decode.two_pass import (
    TwoPass,
    flash_prefix_attention,
    plan_prefix,
    two_pass_attention,
)
from vllm_graft.spec_decode.ways import Point, WayChoice, points

pytestmark = pytest.mark.gpu

RELATIVE = 2e-2
# FlashAttention rounds the softmax weights to e4m3, three bits behind the point.
RELATIVE_FP8 = 1e-1
SPLITS = 132


@pytest.fixture(autouse=True)
def flash_attention_3() -> None:
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    if not is_fa_version_supported(3):
        pytest.skip("needs FlashAttention 3, that is a Hopper GPU")


def bf16(rows: tuple[int, ...], lens: tuple[int, ...], **options: Any) -> AttentionShape:
    sizes = {"kv_heads": 8, "group": 4, "head_size": 128, "max_blocks": 2048}
    return AttentionShape(rows=rows, lens=lens, dtype=torch.bfloat16, **{**sizes, **options})


def make(shape: AttentionShape, seed: int = 0) -> dict[str, Any]:
    problem = tree_problem(shape, "cuda", seed)
    rows = problem["num_rows"]
    problem["prefix_lens"] = torch.where(rows > 0, problem["seq_lens"] - rows, 0).int()
    # FlashAttention's bound is that of the queries; odd requests have three rows more.
    problem["max_rows"] = int(problem["query_start_loc"].diff().max())
    return problem


def first_pass(problem: dict[str, Any], **changes: Any) -> dict[str, Any]:
    names = ("query", "kv_cache", "query_start_loc", "prefix_lens", "block_table", "max_rows")
    return {
        **{name: problem[name] for name in (*names, "scale", "k_scale", "v_scale")},
        "q_scale": None,
        "soft_cap": 0.0,
        "max_seq_len": 32768,
        "multiprocessors": SPLITS,
        **changes,
    }


def nans(problem: dict[str, Any]) -> torch.Tensor:
    return torch.full(problem["query"].shape, float("nan"), dtype=torch.bfloat16, device="cuda")


def expected(problem: dict[str, Any], **options: Any) -> torch.Tensor:
    out = nans(problem).float()
    given = {name: value for name, value in problem.items() if name != "prefix_lens"}
    tree_attention_reference(**{**given, "max_rows": 64}, out=out, **options)
    return out


def run(problem: dict[str, Any], **options: Any) -> torch.Tensor:
    out = nans(problem)
    bounds = {"max_seq_len": 32768, "multiprocessors": SPLITS}
    two_pass_attention(**problem, **{**bounds, **options}, out=out)
    return out


def check(out: torch.Tensor, wanted: torch.Tensor, relative: float = RELATIVE) -> None:
    """Each row and head near its own norm, nothing written elsewhere."""
    assert torch.equal(out.isnan(), wanted.isnan())
    error = (out.float() - wanted).nan_to_num().norm(dim=-1)
    size = wanted.nan_to_num().norm(dim=-1)
    assert (error <= relative * size).all(), f"{(error / size).nan_to_num().max():.4f}"


SHAPES = [
    bf16((32,), (2048,)),
    bf16((32,) * 4, (2048, 40, 32, 9000)),
    bf16((32,) * 32, (100, 33, 32, 4000) * 8),
    bf16((7, 0, 60, 1), (300, 20, 5000, 1), kv_heads=2, group=1),
    bf16((20,) * 5, (20, 21, 999, 64, 3000), kv_heads=1, group=8, block_size=64),
    bf16((32,) * 3, (1000, 2000, 32), head_size=64, slots_first=True),
    bf16((32,) * 3, (1000, 2000, 32), kv_heads=2, head_size=256, block_size=128),
    bf16((1,) * 16, (5000,) * 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"b{len(shape.lens)}-{shape.head_size}")
def test_first_pass(shape: AttentionShape) -> None:
    """The contract of `PrefixAttention`, with and without a plan."""
    problem = make(shape)
    given = first_pass(problem)
    out, lse = prefix_attention_reference(**given)
    seen = ~lse.isnan()
    names = ("query", "kv_cache", "query_start_loc", "prefix_lens", "max_rows", "max_seq_len")
    plan = plan_prefix(**{n: given[n] for n in (*names, "soft_cap", "multiprocessors")})
    for how in (None, plan, plan):
        ours, our_lse = flash_prefix_attention(**given, plan=how)
        assert our_lse.shape == lse.shape
        assert (our_lse - lse)[seen].abs().max() < 1e-2
        error = (ours.float() - out).norm(dim=-1)[seen.T]
        assert (error <= RELATIVE * out.norm(dim=-1)[seen.T]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"b{len(shape.lens)}-{shape.head_size}")
def test_both_passes(shape: AttentionShape) -> None:
    problem = make(shape)
    check(run(problem), expected(problem))


def test_soft_cap() -> None:
    problem = make(bf16((32, 16), (900, 16)))
    problem["scale"] = 0.5
    check(run(problem, soft_cap=5.0), expected(problem, soft_cap=5.0))
    with pytest.raises(AssertionError):
        check(run(problem), expected(problem, soft_cap=5.0))


def test_without_the_mask_the_error_is_seen() -> None:
    problem = make(bf16((32,), (64,)))
    wanted = expected(problem)
    problem["row_masks"].fill_(-1)
    with pytest.raises(AssertionError):
        check(run(problem), wanted)


def test_fp8() -> None:
    problem = make(bf16((32, 32, 20), (3000, 33, 20), fp8=True))
    q_scale = torch.tensor(0.5, device="cuda")
    small = (problem["query"] / q_scale).to(torch.float8_e4m3fn)
    plain = {**problem, "query": small.to(torch.bfloat16) * q_scale.to(torch.bfloat16)}
    # The scales of a layer are scalars.
    problem["v_scale"] = problem["v_scale"].squeeze()
    out = run({**problem, "query": small}, q_scale=q_scale)
    check(out, expected(plain), RELATIVE_FP8)


REPLAYS = [
    ((1000,) * 4, 4),
    ((40, 9000, 32, 30000), 4),
    # The last two are padding: empty queries, no keys.
    ((32, 5000, 0, 0), 2),
    ((0, 0, 0, 0), 0),
]


def test_in_a_graph() -> None:
    """Lengths, pages and masks change between replays, in the very tensors of the capture."""
    rows = 32
    shapes = [bf16((rows,) * 5, (*(max(n, rows) for n in lens), 30000)) for lens, _ in REPLAYS]
    problems = [make(shape, seed) for seed, shape in enumerate(shapes)]
    starts = torch.arange(0, 5 * rows + 1, rows, dtype=torch.int32, device="cuda")
    for problem in problems:
        problem["query"] = problem["query"][: 5 * rows].contiguous()
        problem["row_masks"] = problem["row_masks"][: 5 * rows].clone()
        problem["query_start_loc"] = starts.clone()
        problem["max_rows"] = rows
    static = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in problems[0].items()}
    metadata = SimpleNamespace(num_actual_tokens=5 * rows)
    out, both = nans(static), TwoPass(WayChoice("flash"))
    options = {"max_seq_len": 32768, "multiprocessors": SPLITS, "soft_cap": 0.0}

    def layers() -> None:
        for _ in range(3):
            both.attend(**static, **options, out=out, metadata=metadata)

    # As vLLM captures: nothing to compute.
    static["num_rows"].zero_()
    static["prefix_lens"].zero_()
    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for (lens, real), problem in zip(REPLAYS, problems, strict=True):
        # The fifth request is there in full batches only.
        real = 5 if real == len(lens) else real
        problem["num_rows"][real:] = 0
        problem["seq_lens"][real:] = 0
        problem["prefix_lens"][real:] = 0
        problem["query_start_loc"][real + 1 :] = real * rows
        for name, value in problem.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        check(out, expected(problem))


@pytest.mark.parametrize("batch", [1, 4, 16, 32])
def test_batches(batch: int) -> None:
    lens = tuple(32 + 977 * r % 5000 for r in range(batch))
    problem = make(bf16((32,) * batch, lens))
    check(run(problem), expected(problem))


def test_no_host_synchronisation() -> None:
    problem = make(bf16((32, 32), (400, 900)))
    options = {"max_seq_len": 32768, "multiprocessors": SPLITS, "soft_cap": 0.0}
    metadata = SimpleNamespace(num_actual_tokens=len(problem["query"]))
    both, out = TwoPass(WayChoice("flash")), nans(problem)
    torch.cuda.set_sync_debug_mode("error")
    try:
        both.attend(**problem, **options, out=out, metadata=metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(out, expected(problem))


@pytest.mark.parametrize("fp8", [False, True])
def test_measurement(fp8: bool) -> None:
    geometry = Geometry(32, 8, 128, torch.bfloat16, fp8, 16)
    where = points({8, 32}, 4, 8192)
    space = AttentionWorkspace.allocate(4, 32, 32, 128, 32, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    costs = measure(geometry, where, space, 8192, "cuda")
    assert list(costs) == where
    for times in costs.values():
        assert times.keys() == {"triton", "flash"}
        assert all(0.5 < time < 1e4 for time in times.values())
    # Four times the keys of four requests take longer, whichever way.
    for way in ("triton", "flash"):
        assert costs[Point(4, 32, 8192)][way] > costs[Point(4, 32, 2048)][way]  # type: ignore[index]
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
