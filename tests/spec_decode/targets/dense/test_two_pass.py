"""Both passes of tree attention: the first in plain torch, the second interpreted or compiled."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.references.prefix_reference import prefix_attention_reference
from tests.support.samples.attention_samples import (
    TOLERANCE,
    UNTOUCHED,
    AttentionShape,
    tree_problem,
    untouched,
)
from vllm_graft.spec_decode.kernels.attention.own_rows import attend_own_rows
from vllm_graft.spec_decode.targets.dense.plain_attention import tree_attention_reference
from vllm_graft.spec_decode.targets.dense.two_pass import num_splits, two_pass_attention, why_not
from vllm_graft.spec_decode.trees.batch import TreeBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def two_passes(batch: TreeBatch, out: torch.Tensor | None = None) -> torch.Tensor:
    out = untouched(batch.query) if out is None else out
    two_pass_attention(batch, out, multiprocessors=8, prefix_attention=prefix_attention_reference)
    return out


def error(batch: TreeBatch) -> float:
    ours, expected = two_passes(batch), untouched(batch.query)
    tree_attention_reference(batch, expected)
    assert torch.equal(ours == UNTOUCHED, expected == UNTOUCHED)
    return float((ours.float() - expected.float()).abs().max())


SHAPES = [
    # There is no prefix, so the first pass leaves NaN.
    AttentionShape(rows=(1,), lens=(1,)),
    AttentionShape(rows=(4, 3), lens=(4, 50)),
    # Odd requests have more rows than the tree; a request without rows is left alone.
    AttentionShape(rows=(5, 0, 1), lens=(40, 9, 1), group=2),
    AttentionShape(rows=(64,), lens=(70,), kv_heads=2, group=3),
    AttentionShape(rows=(0, 64, 7), lens=(3, 200, 31), group=8, block_size=128),
    AttentionShape(rows=(9, 16), lens=(150, 17), group=1, block_size=48, slots_first=True),
    AttentionShape(rows=(8, 3), lens=(33, 64), kv_heads=3, group=4, head_size=80),
    AttentionShape(rows=(8,), lens=(65,), kv_heads=2, head_size=128, slots_first=True),
    AttentionShape(rows=(8,), lens=(100,), group=2, head_size=256, block_size=32),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(shape: AttentionShape) -> None:
    assert error(tree_problem(shape, DEVICE)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    shape = AttentionShape(
        rows=(16, 5), lens=(130, 5), kv_heads=2, group=3, head_size=96, dtype=dtype
    )
    assert error(tree_problem(shape, DEVICE)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_fp8_query_beside_an_fp8_cache(dtype: torch.dtype) -> None:
    shape = AttentionShape(rows=(16, 5), lens=(130, 5), kv_heads=2, group=2, dtype=dtype, fp8=True)
    problem = tree_problem(shape, DEVICE)
    q_scale = torch.tensor([0.5], device=DEVICE)
    small = (problem.query / q_scale).to(torch.float8_e4m3fn)
    plain = replace(problem, query=(small.to(dtype) * q_scale).to(dtype))
    expected = untouched(plain.query)
    tree_attention_reference(plain, expected)
    quantized = replace(problem, query=small, q_scale=q_scale)
    prefix_out, prefix_lse = prefix_attention_reference(quantized, multiprocessors=8)
    for query in (small, small.view(torch.uint8)):
        out = untouched(plain.query)
        attend_own_rows(replace(quantized, query=query), prefix_out, prefix_lse, out)
        assert torch.equal(out == UNTOUCHED, expected == UNTOUCHED)
        assert (out.float() - expected.float()).abs().max() < TOLERANCE[dtype]


def test_no_scales_mean_one() -> None:
    problem = tree_problem(
        AttentionShape(rows=(6,), lens=(40,), dtype=torch.float16, fp8=True), DEVICE
    )
    problem = replace(problem, k_scale=None, v_scale=None)
    assert error(problem) < TOLERANCE[torch.float16]


def test_soft_cap() -> None:
    problem = tree_problem(AttentionShape(rows=(6, 4), lens=(50, 4), group=2), DEVICE)
    problem = replace(problem, scale=3.0)
    capped = replace(problem, soft_cap=5.0)
    assert error(capped) < 1e-4
    assert (two_passes(capped) - two_passes(problem)).abs().max() > 0.01


def test_sinks() -> None:
    """A sink is in the sum of weights once, with a prefix and without one."""
    shape = AttentionShape(rows=(6, 4), lens=(50, 4), kv_heads=2, group=3, sinks=True)
    problem = tree_problem(shape, DEVICE)
    assert error(problem) < TOLERANCE[torch.float32]
    without = two_passes(replace(problem, sinks=None))
    assert ((two_passes(problem) - without).abs().amax((1, 2))[problem.row_masks > 0] > 0.01).all()


def test_without_the_mask_the_rows_differ() -> None:
    problem = tree_problem(AttentionShape(rows=(8, 64), lens=(40, 80)), DEVICE)
    masked = two_passes(problem)
    problem.row_masks.fill_(-1)
    assert (masked - two_passes(problem)).abs().max() > 0.1


def test_last_bit_makes_the_last_key_visible() -> None:
    problem = tree_problem(AttentionShape(rows=(64,), lens=(64,)), DEVICE)
    problem.row_masks[63] = -(1 << 63)
    page = problem.block_table[0, 63 // 16]
    value = problem.kv_cache[page, 0, 63 % 16, 64:]
    assert torch.allclose(two_passes(problem)[63, 0], value, atol=1e-6)


def test_a_row_that_sees_none_of_the_tree_keeps_its_prefix() -> None:
    problem = tree_problem(AttentionShape(rows=(3, 3), lens=(3, 9)), DEVICE)
    problem.row_masks[[1, 7]] = 0
    out = two_passes(problem)
    # Without a prefix the row sees no key at all.
    assert not out[1].any()
    expected = untouched(problem.query)
    tree_attention_reference(problem, expected)
    assert torch.allclose(out[7], expected[7], atol=1e-5)
    assert out[7].any()


def test_padding_requests_have_no_rows() -> None:
    """A replayed graph has empty queries of length 0 after the real ones."""
    problem = tree_problem(AttentionShape(rows=(4, 4), lens=(30, 4)), DEVICE)
    end = problem.query_start_loc[-1:]
    none = end * 0
    padded = replace(
        problem,
        query_start_loc=torch.cat([problem.query_start_loc, end, end]),
        seq_lens=torch.cat([problem.seq_lens, none, none]),
        prefix_lens=torch.cat([problem.prefix_lens, none, none]),
        num_rows=torch.cat([problem.num_rows, none, none]),
        block_table=torch.cat([problem.block_table] * 2),
    )
    assert torch.equal(two_passes(padded), two_passes(problem))


def test_rows_of_an_earlier_wider_batch_stay_in_their_query() -> None:
    # A graph of narrow queries is captured after vLLM's warm-up has run wide ones.
    problem = tree_problem(AttentionShape(rows=(4, 4, 4), lens=(40, 20, 70), group=2), DEVICE)
    tokens = len(problem.query)
    found = []
    for num_rows in (torch.full_like(problem.num_rows, 12), problem.num_rows):
        around = torch.full((3 * tokens, *problem.query.shape[1:]), UNTOUCHED, device=DEVICE)
        out = around[tokens : 2 * tokens]
        two_passes(replace(problem, num_rows=num_rows), out)
        assert (around[:tokens] == UNTOUCHED).all()
        assert (around[2 * tokens :] == UNTOUCHED).all()
        found.append(out)
    assert torch.equal(*found)


def test_bound_of_rows_beyond_those_in_use() -> None:
    problem = tree_problem(AttentionShape(rows=(8, 2), lens=(40, 20), group=4), DEVICE)
    problem = replace(problem, max_rows=64)
    assert error(problem) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "kv_heads", "splits"),
    [
        # 32 rows x 4 heads are a tile for each of 8 KV heads; there are 132 multiprocessors.
        (32, 32, 32, 8, 16),
        (32 * 8, 32, 32, 8, 16),
        # A split takes 16.9 MB, so 7 fit the budget.
        (32 * 32, 32, 32, 8, 7),
        (32, 32, 4, 1, 64),
        # 64 rows x 8 heads are four tiles per KV head.
        (64, 64, 64, 8, 4),
        (1 << 16, 64, 64, 8, 1),
    ],
)
def test_splits_fill_the_device_and_fit_the_budget(
    tokens: int, rows: int, heads: int, kv_heads: int, splits: int
) -> None:
    problem = tree_problem(AttentionShape(rows=(rows,), lens=(rows,)), "cpu")
    sized = replace(
        problem,
        query=torch.empty(tokens, heads, 128, device="meta"),
        kv_cache=torch.empty(1, kv_heads, 16, 256, device="meta"),
    )
    found = num_splits(sized, 132)
    assert found == splits
    assert found == 1 or found * 4 * tokens * heads * 129 <= 128 << 20


def layer(backend: str = "FLASH_ATTN", **changes: Any) -> Any:
    impl = {
        "vllm_flash_attn_version": 3,
        "batch_invariant_enabled": False,
        "kv_cache_dtype": "auto",
        "supports_quant_query_input": False,
    }
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(
        impl=SimpleNamespace(**{**impl, **changes}), get_attn_backend=lambda: named
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (layer("TRITON_ATTN"), "the attention backend is TRITON_ATTN"),
        (layer(vllm_flash_attn_version=2), "vLLM uses FlashAttention 2 here"),
        (layer(vllm_flash_attn_version=None), "FlashAttention None"),
        (layer(batch_invariant_enabled=True), "VLLM_BATCH_INVARIANT"),
        (layer(kv_cache_dtype="fp8"), "queries are not quantized beside the fp8"),
    ],
)
def test_what_has_no_first_pass(given: Any, words: str) -> None:
    assert words in str(why_not(given))


def test_what_has_one() -> None:
    assert why_not(layer()) is None
    assert why_not(layer(kv_cache_dtype="fp8_e4m3", supports_quant_query_input=True)) is None
