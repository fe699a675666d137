"""Kernels that move the accepted path: K/V, and rows of tokens."""

import pytest
import torch

from tests.support.crossed import crossed
from tests.support.references.tree_reference import compact_kv_reference, follow_path_reference
from vllm_graft.spec_decode.kernels.compact import KVCacheTable, TokenRows, compact_kv, follow_path

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


UNTOUCHED = -7


def random_path(nodes: int, count: int, generator: torch.Generator) -> list[int]:
    picked = torch.randperm(nodes, generator=generator)[: count - 1] + 1
    return [0, *picked.sort().values.tolist()]


def token_rows(tokens: int, width: int, device: str) -> TokenRows:
    """Make rows that hold their number, and states with a stride of their own."""
    number = torch.arange(tokens, device=device)
    states = torch.zeros(tokens, width + 3, device=device, dtype=torch.float16)[:, :width]
    states += number[:, None] % 1000 + torch.arange(width, device=device) / 2048
    return TokenRows(number.int() + 10, 3 * number, states)


def moved(
    lengths: list[int],
    drafts: list[int],
    paths: list[list[int]],
    padding: int,
    *,
    reference: bool = False,
    width: int = 24,
) -> TokenRows:
    device = "cpu" if reference else DEVICE
    num_reqs, tokens = len(lengths), sum(lengths) + padding
    # Entries after the path are garbage that must not be used.
    path = torch.full((num_reqs + 1, 64), 1 << 20, dtype=torch.int32)
    for r, nodes in enumerate(paths):
        path[r, : len(nodes)] = torch.tensor(nodes)
    out = TokenRows(
        torch.full((tokens + 5,), UNTOUCHED, device=device, dtype=torch.int32),
        torch.full((tokens + 5,), UNTOUCHED, device=device),
        torch.full((tokens + 5, width), UNTOUCHED, device=device, dtype=torch.float16),
    )
    # Entries after the batch's queries are from an earlier batch.
    starts = [*torch.tensor([0, *lengths]).cumsum(0).tolist(), 1, 2]
    run = follow_path_reference if reference else follow_path
    run(
        path.to(device),
        torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(drafts, dtype=torch.int32, device=device),
        token_rows(tokens, width, device),
        out,
        num_reqs=num_reqs,
        num_tokens=tokens,
        max_reqs=7,
    )
    return TokenRows(*(tensor.cpu() for tensor in out))


@pytest.mark.parametrize(
    ("requests", "width", "padding"),
    crossed(
        [([1], [0]), ([4], [3]), ([64], [63]), ([5, 700, 1, 9, 256], [4, 0, 0, 6, 0])],
        [24, 1500],
        [0, 300],
    ),
)
def test_path_equals_reference(
    requests: tuple[list[int], list[int]], width: int, padding: int
) -> None:
    lengths, drafts = requests
    generator = torch.Generator().manual_seed(sum(lengths))
    paths = [random_path(n, max(1, n // 2), generator) if n else [3] for n in drafts]
    ours = moved(lengths, drafts, paths, padding, width=width)
    theirs = moved(lengths, drafts, paths, padding, width=width, reference=True)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_accepted_rows_come_first() -> None:
    found = moved([2, 6], [0, 4], [[0], [0, 2, 4]], padding=1)
    source = [0, 1, 2, 3, 5, 7, 6, 7, 8]
    assert found.ids.tolist() == [10 + row for row in source] + [UNTOUCHED] * 5
    assert found.positions.tolist() == [3 * row for row in source] + [UNTOUCHED] * 5
    states = token_rows(9, 24, "cpu").states
    assert torch.equal(found.states[:9], states[source])
    assert (found.states[9:] == UNTOUCHED).all()
