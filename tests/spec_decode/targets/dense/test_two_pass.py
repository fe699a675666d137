"""What two passes of tree attention alone have; the rest is in `test_tree_attention`."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.spec_decode.kernels.attention.test_tree_attention import (
    DEVICE,
    output,
    tree_error,
    two_passes,
)
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
from vllm_graft.spec_decode.targets.dense.two_pass import num_splits, why_not


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


def test_sinks() -> None:
    """A sink is in the sum of weights once, with a prefix and without one."""
    shape = AttentionShape(rows=(6, 4), lens=(50, 4), kv_heads=2, group=3, sinks=True)
    problem = tree_problem(shape, DEVICE)
    assert tree_error(problem, two_passes) < TOLERANCE[torch.float32]
    without = output(replace(problem, sinks=None), two_passes)
    assert (
        (output(problem, two_passes) - without).abs().amax((1, 2))[problem.row_masks > 0] > 0.01
    ).all()


def test_a_row_that_sees_none_of_the_tree_keeps_its_prefix() -> None:
    problem = tree_problem(AttentionShape(rows=(3, 3), lens=(3, 9)), DEVICE)
    problem.row_masks[[1, 7]] = 0
    out = output(problem, two_passes)
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
    assert torch.equal(output(padded, two_passes), output(problem, two_passes))


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
