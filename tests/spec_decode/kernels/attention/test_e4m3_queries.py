"""E4m3 in attention: each number becomes itself, and queries beside a cache, against float32."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.support.references.tree_reference import tree_attention_reference
from tests.support.samples.attention_samples import (
    UNTOUCHED,
    AttentionShape,
    draft_problem,
    tree_problem,
)
from tests.support.samples.attention_spaces import converted, nan_space, with_small_query
from vllm_graft.spec_decode.kernels.attention.attention_plan import (
    Plan,
    Sizes,
    Tile,
    choose_plan,
    native_bytes,
)
from vllm_graft.spec_decode.kernels.attention.e4m3 import (
    PACKED,
    PLAIN,
    PRODUCTS,
    conversion,
    load_rows,
    native,
)
from vllm_graft.spec_decode.kernels.attention.tree_attention import plan_of, tree_attention
from vllm_graft.spec_decode.trees.batch import DraftBatch, TreeBatch

# The interpreter has no conversions of a device's own, and no e4m3 tensor cores.
DEVICE = "cpu"

WEIGHTS = 1e-3
"""Largest error of an output in float32: softmax weights are rounded to fp16."""


def error(
    problem: TreeBatch | DraftBatch, dtype: torch.dtype = torch.float32, **how: object
) -> float:
    shape = problem.query.shape
    ours = torch.full(shape, UNTOUCHED, dtype=dtype, device=DEVICE)
    wanted = torch.full(shape, UNTOUCHED, device=DEVICE)
    tree_attention(problem, ours, **how)  # type: ignore[arg-type]
    tree_attention_reference(problem, wanted)
    assert torch.equal(ours == UNTOUCHED, wanted == UNTOUCHED)
    return float((ours.float() - wanted).abs().max())


TREES = [
    AttentionShape(rows=(5, 0, 1), lens=(40, 9, 1), group=2),
    AttentionShape(rows=(16, 5), lens=(130, 7), kv_heads=2, group=3, head_size=96),
    AttentionShape(rows=(9,), lens=(70,), group=4, head_size=256, slots_first=True),
    AttentionShape(rows=(12,), lens=(150,), group=4, head_size=16, window=64, sinks=True),
    AttentionShape(rows=(9, 16), lens=(150, 17), group=2, window=48, chunked=True),
]


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_trees(shape: AttentionShape) -> None:
    problem = tree_problem(replace(shape, fp8=True, dtype=torch.bfloat16), DEVICE)
    problem = with_small_query(replace(problem, sinks=_float(problem.sinks)))
    plan = Plan(Tile(64, 32, 4, 1), 3, ahead=True, edges=shape.window > 0, skip_empty=True)
    assert error(problem, workspace=nan_space(problem, 6), plan=plan) < WEIGHTS
    assert error(replace(problem, soft_cap=5.0)) < WEIGHTS
    # Bytes are the same numbers, and scales may be missing.
    raw = replace(
        problem, query=problem.query.view(torch.uint8), kv_cache=problem.kv_cache.view(torch.uint8)
    )
    assert error(replace(raw, q_scale=None, k_scale=None, v_scale=None)) < WEIGHTS


def _float(sinks: torch.Tensor | None) -> torch.Tensor | None:
    return None if sinks is None else sinks.float()


@pytest.mark.parametrize("splits", [1, 4])
def test_levels_of_a_draft(splits: int) -> None:
    """The scratch is bfloat16 and has no scale of keys; the query's scale is that of both."""
    shape = AttentionShape(
        rows=(), lens=(90, 0, 20), kv_heads=2, group=2, fp8=True, dtype=torch.bfloat16
    )
    problem = with_small_query(draft_problem(shape, 4, 3, 2, DEVICE))
    space = nan_space(problem, 12)
    found = error(problem, torch.bfloat16, workspace=space, num_splits=splits)
    # Weights of the scratch are bfloat16, as its values are.
    assert found < 4e-2
    plain = converted(problem)
    assert error(plain, torch.bfloat16, workspace=space, num_splits=splits) < 4e-2


def test_nothing_is_rounded_but_weights() -> None:
    """A conversion to bfloat16 rounds the query times its scale, and weights in bfloat16."""
    shape = AttentionShape(rows=(16,), lens=(60,), head_size=128, fp8=True, dtype=torch.bfloat16)
    problem = with_small_query(tree_problem(shape, DEVICE))
    plain, wanted = converted(problem), torch.zeros(problem.query.shape)
    tree_attention_reference(problem, wanted)
    errors = []
    for batch in (problem, plain):
        out = torch.zeros(batch.query.shape)
        tree_attention(batch, out)
        errors.append(float((out - wanted).abs().max()))
    assert 4 * errors[0] < errors[1] < 4e-2


def test_without_its_scale_the_query_is_another() -> None:
    """Negative control of what is compared above."""
    shape = AttentionShape(rows=(6,), lens=(50,), fp8=True, dtype=torch.bfloat16)
    problem = with_small_query(tree_problem(shape, DEVICE))
    out, wanted = torch.zeros(problem.query.shape), torch.zeros(problem.query.shape)
    tree_attention_reference(problem, wanted)
    tree_attention(replace(problem, q_scale=None), out)
    assert (out - wanted).abs().max() > 100 * WEIGHTS


def test_refusals() -> None:
    shape = AttentionShape(rows=(6,), lens=(50,), fp8=True, dtype=torch.bfloat16)
    problem = with_small_query(tree_problem(shape, DEVICE))
    out = torch.zeros(problem.query.shape, dtype=torch.bfloat16)
    wide = replace(problem, kv_cache=problem.kv_cache.to(torch.bfloat16))
    with pytest.raises(ValueError, match="they must be equal unless the cache is e4m3"):
        tree_attention(wide, out)
    with pytest.raises(ValueError, match=r"the output has dtype torch\.float8_e4m3fn"):
        tree_attention(problem, out.to(torch.float8_e4m3fn))
    space = replace(nan_space(problem, 1), capability=(8, 0))
    with pytest.raises(ValueError, match=r"8\.9 or more, this device has 8\.0: convert the query"):
        tree_attention(problem, out, workspace=space)
    shape = replace(shape, rows=(), lens=(20,))
    level = with_small_query(draft_problem(shape, 2, 2, 0, DEVICE))
    out = torch.zeros(level.query.shape, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"scratch has dtype torch\.bfloat16, the output torch"):
        tree_attention(level, out)


def test_devices_on_which_it_was_measured_are_asked_for_it() -> None:
    def taken(dtype: torch.dtype = torch.bfloat16) -> list[tuple[int, int]]:
        devices = [(0, 0), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
        return [each for each in devices if native(each, dtype)]

    assert taken() == taken(torch.float16) == [(9, 0)]
    # A model in float32 has weights of 32 bits.
    assert taken(torch.float32) == []


def sizes(rows: int, head: int = 128, num_reqs: int = 1, **kinds: object) -> Sizes:
    """Sizes of a launch on an H200, whose query and cache are e4m3."""
    device = {"multiprocessors": 132, "capability": (9, 0), "most_splits": 64}
    return Sizes(rows, head, torch.float16, num_reqs, 8, 32768, **device, **kinds)  # type: ignore[arg-type]


def test_tiles_of_e4m3_keys() -> None:
    def tile(rows: int, **kinds: Any) -> Tile:
        return choose_plan(sizes(rows, native=True, **kinds)).tile

    for rows in (1, 16, 64):
        assert tile(rows) == Tile(64, 64, 4, 3)
    for rows in (96, 128, 256):
        assert tile(rows, num_reqs=4) == Tile(128, 64, 8, 3)
    # One request has no two tiles of 128 rows below 129 rows.
    assert tile(128) == Tile(64, 64, 4, 3)
    assert tile(129) == tile(256) == Tile(128, 64, 8, 3)
    assert tile(256, head=256) == Tile(128, 32, 8, 3)
    # In drafts, and with the largest heads, tiles are those of 16 bits.
    for rows, head, draft in product((16, 32, 256), (64, 128, 512), (False, True)):
        plain = choose_plan(sizes(rows, head, draft=draft)).tile
        assert (tile(rows, head=head, draft=draft) == plain) == (draft or head == 512)


def test_tiles_of_e4m3_keys_fit_registers_and_memory() -> None:
    for rows, head, num_reqs in product((4, 32, 128, 512), (64, 128, 256), (1, 4, 64)):
        for mixed in (False, True):
            plan = choose_plan(sizes(rows, head, num_reqs, native=True, mixed=mixed))
            assert native_bytes(plan.tile, head) <= 220 << 10
            assert plan.tile.rows * head <= 128 * 32 * plan.tile.warps
            # No second program where registers have room for one.
            programs = num_reqs * 8 * -(-rows // plan.tile.rows) * plan.splits
            assert plan.tile.rows < 128 or programs <= 132 or plan.splits == 1


def test_e4m3_keys_have_more_splits() -> None:
    """A program of 128 rows has eight warps, so that one fills a multiprocessor."""

    def splits(*, native: bool) -> list[int]:
        return [choose_plan(sizes(256, num_reqs=n, native=native)).splits for n in (1, 4, 16)]

    assert splits(native=True) == [8, 2, 1]
    assert splits(native=False) == [8, 1, 1]
    assert native_bytes(Tile(64, 128, 4, 2), 128) == 112 << 10


def test_a_batch_with_an_e4m3_query_has_such_a_plan() -> None:
    shape = AttentionShape(rows=(33,), lens=(90,), group=4, fp8=True, dtype=torch.bfloat16)
    problem = tree_problem(shape, DEVICE)
    space = replace(nan_space(problem, 4), multiprocessors=132, capability=(9, 0))
    assert plan_of(with_small_query(problem), space).tile == Tile(128, 64, 8, 3)
    assert plan_of(problem, space).tile == Tile(64, 64, 4, 3)


# mypy: allow-untyped-defs, allow-incomplete-defs


DTYPES = [torch.bfloat16, torch.float16, torch.float32]

NAN = [0x7F, 0xFF]
"""Bytes that are no numbers. A cache holds none, as vLLM saturates what it writes."""


@triton.jit
def _convert(cache, out, FP8: tl.constexpr):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    rows = load_rows(cache + place, place < 256, out.dtype.element_ty, FP8)
    tl.store(out + place, rows)


def all_numbers_of(dtype: torch.dtype, form: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel and PyTorch make of all bytes that are numbers."""
    cache = torch.arange(256, dtype=torch.uint8, device=device)
    if form == PRODUCTS:
        cache = cache.view(torch.float8_e4m3fn)
    out = torch.zeros(256, dtype=dtype, device=device)
    _convert[(1,)](cache, out, FP8=form)
    expected = cache.view(torch.float8_e4m3fn).to(dtype)
    numbers = torch.ones(256, dtype=torch.bool)
    numbers[NAN] = False
    return out.cpu()[numbers], expected.cpu()[numbers]


ON_A_DEVICE = pytest.mark.gpu
HAS_INSTRUCTIONS = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="the device has no instructions for e4m3",
)


@pytest.mark.parametrize(
    ("dtype", "form", "device"),
    [
        *((dtype, PLAIN, "cpu") for dtype in DTYPES),
        (torch.float16, PRODUCTS, "cpu"),
        pytest.param(torch.float16, PRODUCTS, "cuda", marks=[ON_A_DEVICE, HAS_INSTRUCTIONS]),
        *(
            pytest.param(dtype, form, "cuda", marks=ON_A_DEVICE)
            for dtype in DTYPES[:2]
            for form in (PLAIN, PACKED)
        ),
    ],
)
def test_all_numbers(dtype: torch.dtype, form: int, device: str) -> None:
    found, expected = all_numbers_of(dtype, form, device)
    assert expected.isfinite().all()
    # Bit for bit, the sign of zero as well.
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_numbers_are_packed_where_there_are_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA GPUs, in 16 bits; a tensor without memory stands for one there."""
    cache = {device: torch.empty(4, dtype=torch.uint8, device=device) for device in ("cpu", "meta")}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert conversion(cache["meta"], torch.bfloat16) == PACKED
    assert conversion(cache["meta"].view(torch.float8_e4m3fn), torch.float16) == PACKED
    assert (
        conversion(cache["meta"], torch.float32)
        == conversion(cache["cpu"], torch.bfloat16)
        == PLAIN
    )
    assert conversion(cache["cpu"].to(torch.bfloat16), torch.bfloat16) == 0
    monkeypatch.setattr(torch.version, "cuda", None)
    assert conversion(cache["meta"], torch.bfloat16) == PLAIN


def test_beside_an_e4m3_query_nothing_is_converted_by_hand() -> None:
    cache = torch.empty(4, dtype=torch.uint8, device="meta")
    for query in (torch.uint8, torch.float8_e4m3fn):
        assert conversion(cache, query) == PRODUCTS
