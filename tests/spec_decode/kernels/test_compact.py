from __future__ import annotations

import pytest
import torch

from tests.support.references.tree_reference import compact_kv_reference
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, compact_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache(
    dtype: torch.dtype, heads: int, block_size: int, head_size: int, slots_first: bool
) -> torch.Tensor:
    dims = [24 * 16 // block_size, heads, block_size, 2 * head_size]
    if slots_first:
        dims[1], dims[2] = dims[2], dims[1]
    values = torch.randn(dims, generator=torch.Generator().manual_seed(heads)).to(dtype)
    return values.transpose(1, 2) if slots_first else values


LAYERS = {
    "same": [(torch.float32, 2, 16, 8, False)] * 3,
    "NHD and HND": [(torch.bfloat16, 2, 16, 8, True), (torch.bfloat16, 2, 16, 8, False)],
    "heads, sizes, blocks": [
        (torch.float16, 1, 48, 20, False),
        (torch.float16, 4, 16, 64, True),
        (torch.float16, 2, 128, 3, False),
    ],
    "dtypes": [(torch.uint8, 2, 16, 5, False), (torch.bfloat16, 3, 16, 80, True)],
}


def raw(caches: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu().clone().contiguous().view(torch.uint8) for tensor in caches]


def step(groups: int) -> dict[str, torch.Tensor]:
    """Make five requests: scattered path, plain, contiguous path, one token, full path."""
    lengths, drafts = [34, 3, 8, 6, 64], [31, 0, 7, 5, 63]
    paths = [[0, 3, 4, 9, 31], [0, 1, 2], [0, 1, 2, 3], [0], list(range(64))]
    path = torch.full((6, 64), 1 << 20, dtype=torch.int32)
    for r, nodes in enumerate(paths):
        path[r, : len(nodes)] = torch.tensor(nodes)
    generator = torch.Generator().manual_seed(7)
    tokens = sum(lengths)
    slots = torch.stack([torch.randperm(384, generator=generator)[:tokens] for _ in range(groups)])
    slots[0, 2 + 4] = -1
    return {
        "path": path,
        "num_sampled": torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(),
        "num_draft_tokens": torch.tensor(drafts, dtype=torch.int32),
        "slot_mappings": slots,
    }


@pytest.mark.parametrize("layers", LAYERS)
def test_equals_reference(layers: str) -> None:
    caches = [cache(*shape) for shape in LAYERS[layers]]
    groups = [i % 2 for i in range(len(caches))]
    inputs = step(2)
    ours = [tensor.clone().to(DEVICE) for tensor in caches]
    assert [tensor.stride() for tensor in ours] == [tensor.stride() for tensor in caches]
    before = raw(ours)
    table = KVCacheTable.build(ours, groups)
    compact_kv(table, **{k: v.to(DEVICE) for k, v in inputs.items()}, num_reqs=5)
    compact_kv_reference(caches, groups, **inputs, num_reqs=5)
    for mine, theirs, old in zip(raw(ours), raw(caches), before, strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, old)


def test_overlapping_moves() -> None:
    """Each row is the source of one move and the target of the one after it."""
    keys = torch.arange(64.0, device=DEVICE)[None, None, :, None].repeat(1, 1, 1, 4).contiguous()
    inputs = {
        "path": torch.tensor([[0, *range(2, 64)]], dtype=torch.int32),
        "num_sampled": torch.tensor([63], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 64], dtype=torch.int32),
        "num_draft_tokens": torch.tensor([63], dtype=torch.int32),
        "slot_mappings": torch.arange(64)[None],
    }
    table = KVCacheTable.build([keys], [0])
    compact_kv(table, **{k: v.to(DEVICE) for k, v in inputs.items()}, num_reqs=1)
    assert keys[0, 0, :, 0].tolist() == [0, *range(2, 64), 63]
    assert (keys == keys[..., :1]).all()


@pytest.mark.parametrize(
    ("head_size", "dtype", "unit"),
    [(64, torch.bfloat16, 8), (3, torch.bfloat16, 4), (3, torch.uint8, 2), (80, torch.uint8, 8)],
)
def test_unit_is_the_widest_that_divides(head_size: int, dtype: torch.dtype, unit: int) -> None:
    tensor = torch.zeros(2, 1, 16, 2 * head_size, dtype=dtype, device=DEVICE)
    assert KVCacheTable.build([tensor], [0]).unit == unit


def test_refuses_other_layouts() -> None:
    with pytest.raises(ValueError, match="contiguous last dimension"):
        KVCacheTable.build([torch.zeros(2, 2, 2, 4).transpose(2, 3)], [0])
    with pytest.raises(ValueError, match="contiguous last dimension"):
        KVCacheTable.build([torch.zeros(2, 2, 2)], [0])
    with pytest.raises(ValueError, match="1 KV caches but 2 groups"):
        KVCacheTable.build([torch.zeros(2, 2, 2, 4)], [0, 1])
