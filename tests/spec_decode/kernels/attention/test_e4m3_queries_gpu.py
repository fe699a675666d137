"""Attention with e4m3 queries on a GPU that multiplies such numbers, against float32."""

from dataclasses import replace

import pytest
import torch

from tests.support.samples.attention_samples import AttentionShape, draft_problem, tree_problem
from tests.support.samples.attention_spaces import (
    attend,
    captured,
    check_rows,
    converted,
    nan_space,
    wanted_of,
    with_small_query,
)
from vllm_graft.spec_decode.kernels.attention.tree_attention import tree_attention
from vllm_graft.spec_decode.trees.batch import TreeBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="the device has no instructions for e4m3",
    ),
]

RELATIVE = 1e-2
SHAPES = [
    AttentionShape(rows=(8,), lens=(2000,), kv_heads=8, group=4, head_size=128),
    AttentionShape(rows=(16, 5), lens=(3000, 70), kv_heads=2, group=1, head_size=128),
    AttentionShape(rows=(64, 0, 7), lens=(5000, 3, 350), kv_heads=8, group=4, head_size=128),
    AttentionShape(rows=(32, 9), lens=(1900, 70), kv_heads=2, group=8, head_size=64, window=128),
    AttentionShape(rows=(32,), lens=(900,), kv_heads=2, group=4, head_size=256, sinks=True),
    AttentionShape(rows=(9, 16), lens=(900, 17), kv_heads=2, group=4, window=48, chunked=True),
    AttentionShape(rows=(12,), lens=(300,), kv_heads=2, group=3, head_size=80, slots_first=True),
    AttentionShape(rows=(16,), lens=(500,), kv_heads=2, group=4, head_size=512),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees(shape: AttentionShape) -> None:
    shape = replace(shape, fp8=True, dtype=torch.bfloat16)
    problem = with_small_query(tree_problem(shape, "cuda"))
    for batch in (problem, replace(problem, max_seq_len=32768, soft_cap=20.0)):
        check_rows(attend(batch, 16), wanted_of(batch), RELATIVE)


@pytest.mark.parametrize(("num_reqs", "topk"), [(1, 8), (4, 8), (16, 4)])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_levels_of_a_draft(head_size: int, num_reqs: int, topk: int) -> None:
    shape = AttentionShape(
        rows=(), lens=(900,) + (70,) * (num_reqs - 1), kv_heads=8, group=4,
        head_size=head_size, fp8=True, dtype=torch.bfloat16,
    )  # fmt: skip
    problem = with_small_query(draft_problem(shape, topk, 6, 4, "cuda"))
    check_rows(attend(problem, 16), wanted_of(problem), 2e-2)


def peaked(head_size: int) -> TreeBatch:
    """A problem in which some keys are their queries, so that logits reach 15 and more."""
    shape = AttentionShape(
        rows=(8,), lens=(600,), head_size=head_size, fp8=True, dtype=torch.bfloat16
    )
    problem = tree_problem(shape, "cuda")
    query = problem.query[:, 0].float().repeat_interleave(4, 0)
    keys = query + 0.2 * torch.randn(query.shape, device="cuda")
    pages = problem.block_table[0, :2].long()
    cache = problem.kv_cache.float()
    cache[pages, 0, :, :head_size] = keys.view(2, 16, head_size)
    small = cache.to(torch.float8_e4m3fn)
    return with_small_query(replace(problem, kv_cache=small, k_scale=None))


@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_sums_of_products_are_accurate(head_size: int) -> None:
    """Products of e4m3 are added with some bits less than float32."""
    problem = peaked(head_size)
    wanted = wanted_of(problem)
    check_rows(attend(problem, 16), wanted, 1e-2)
    # Negative control: such a bound sees keys in which a sixteenth of a head is missing.
    cache = problem.kv_cache.float()
    cache[..., : head_size // 16] = 0
    other = replace(problem, kv_cache=cache.to(torch.float8_e4m3fn))
    with pytest.raises(AssertionError):
        check_rows(attend(other, 16), wanted, 1e-2)


def test_the_same_as_the_layer_computes_without() -> None:
    """In a replayed graph, too."""
    shape = replace(SHAPES[2], fp8=True, dtype=torch.bfloat16)
    problem = with_small_query(tree_problem(shape, "cuda"))
    check_rows(attend(converted(problem), 16), wanted_of(problem), 2e-2)
    space = nan_space(problem, 16)
    out = torch.full(problem.query.shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    graph = captured(lambda: tree_attention(problem, out, workspace=space))
    eager = out.clone()
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out.nan_to_num(), eager.nan_to_num())
    check_rows(out, wanted_of(problem), RELATIVE)
