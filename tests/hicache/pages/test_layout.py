"""Where pages lie on the device, and which of them a prefix needs."""

import ctypes
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_graft.base.errors import GraftError
from vllm_graft.hicache.pages.groups import Group, HitPolicy, alignment, longest_hit
from vllm_graft.hicache.pages.layout import copies, group_layers, page_runs, pages_bytes


def _group(index: int, policy: HitPolicy, block: int, window: int = 0) -> Group:
    return Group(index, block, 1, policy, window, 4096, (f"layers.{index}",))


FULL = _group(0, HitPolicy.ALL_PAGES, 16)
WINDOW = _group(1, HitPolicy.TRAILING_PAGES, 16, 40)
STATE = _group(2, HitPolicy.LAST_PAGE, 32)


def test_what_a_prefix_needs() -> None:
    assert list(FULL.needed(32, 96)) == [2, 3, 4, 5]
    assert list(WINDOW.needed(0, 160)) == [7, 8, 9], "token 160 looks back to 121"
    assert list(WINDOW.needed(128, 160)) == [8, 9]
    assert list(WINDOW.needed(0, 16)) == [0]
    assert list(STATE.needed(0, 96)) == [2]
    assert list(STATE.needed(96, 96)) == []
    assert alignment([FULL, WINDOW, STATE]) == 32


def _by_definition(
    groups: list[Group], start: int, limit: int, missing: set[tuple[int, int]]
) -> int:
    step = alignment(groups)
    for end in range(limit // step * step, start, -step):
        needed = [(group.index, block) for group in groups for block in group.needed(start, end)]
        if not missing.intersection(needed):
            return end
    return start


@given(
    pools=st.sets(st.sampled_from([FULL, WINDOW, STATE]), min_size=1),
    start=st.integers(0, 6).map(lambda blocks: blocks * 32),
    limit=st.integers(0, 400),
    missing=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 24)), max_size=12),
)
def test_longest_hit_is_the_longest(
    pools: set[Group], start: int, limit: int, missing: set[tuple[int, int]]
) -> None:
    groups = sorted(pools, key=lambda group: group.index)

    def has(group: int, block: int) -> bool:
        return (group, block) not in missing

    assert longest_hit(groups, start, limit, has) == _by_definition(groups, start, limit, missing)


BLOCKS, HEADS, STATES, CONTENT = 6, 2, 4, 8


def _layers(order: str) -> dict[str, torch.Tensor]:
    """Make views [B, H, N, C] of two layers of one allocation whose axes are in ``order``."""
    sizes = {"L": 2, "B": BLOCKS, "H": HEADS, "N": STATES, "C": CONTENT}
    count = 2 * BLOCKS * HEADS * STATES * CONTENT
    whole = torch.arange(count, dtype=torch.float32).view([sizes[axis] for axis in order])
    views = whole.permute([order.index(axis) for axis in "LBHNC"])
    return {f"model.layers.{number}.attn": views[number] for number in range(2)}


def _gather(
    caches: dict[str, torch.Tensor], blocks: list[int], slots: list[int], pinned: int = 8
) -> Any:
    layers = group_layers(list(caches), caches, BLOCKS)
    size = pages_bytes(layers)
    host = torch.zeros(8, size, dtype=torch.uint8)
    batch = copies(layers, blocks, slots, size, host.data_ptr(), pinned)
    for device, at, count in zip(batch.device.tolist(), batch.host.tolist(), batch.sizes.tolist()):
        ctypes.memmove(at, device, count)
    return host.view(torch.float32), batch


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_layout_of_vllm(order: str) -> None:
    caches = _layers(order)
    blocks, slots = [4, 1, 2], [0, 5, 6]
    host, batch = _gather(caches, blocks, slots)
    assert batch.num_bytes == 3 * 2 * HEADS * STATES * CONTENT * 4
    for block, slot in zip(blocks, slots):
        expected = torch.cat([cache[block].reshape(-1) for cache in caches.values()])
        assert sorted(host[slot].tolist()) == sorted(expected.tolist())
    untouched = [slot for slot in range(8) if slot not in slots]
    assert not host[untouched].any()


def test_neighbours_are_one_copy() -> None:
    _, batch = _gather(_layers("BLHNC"), [1, 2, 4], [3, 4, 5])
    assert len(batch) == 2, "blocks 1 and 2 are neighbours on both sides, with all their layers"
    _, batch = _gather(_layers("BLHNC"), [2, 1], [3, 4])
    assert len(batch) == 2
    _, batch = _gather(_layers("LBHNC"), [1, 2], [3, 4])
    assert len(batch) == 4


def test_no_copy_reaches_into_memory_that_is_pinned_apart() -> None:
    for pinned, count in ((3, 2), (5, 1)):
        _, batch = _gather(_layers("BLHNC"), [1, 2, 3], [1, 2, 3], pinned)
        assert len(batch) == count


def test_layers_that_share_bytes_are_copied_once() -> None:
    caches = _layers("LBHNC")
    caches["model.layers.2.attn"] = caches["model.layers.0.attn"]
    assert [layer.name for layer in group_layers(list(caches), caches, BLOCKS)] == [
        "model.layers.0.attn",
        "model.layers.1.attn",
    ]


def test_layers_come_in_the_order_in_which_they_run() -> None:
    caches = {f"model.layers.{number}.attn": torch.zeros(4, 2, number + 1) for number in (10, 9, 2)}
    names = [layer.name for layer in group_layers(list(caches), caches, 4)]
    assert names == [f"model.layers.{number}.attn" for number in (2, 9, 10)]


def test_kernel_blocks_are_grouped() -> None:
    cache = torch.arange(12 * 8, dtype=torch.float32).view(12, 8)
    (layer,) = group_layers(["layers.0"], {"layers.0": cache}, 4)
    assert layer.block_stride == 3 * 8 * 4
    assert layer.runs == ((0, 0, 3 * 8 * 4),)
    with pytest.raises(GraftError, match="multiple of 5 blocks"):
        group_layers(["layers.0"], {"layers.0": cache}, 5)


def test_padding_between_blocks_is_not_copied() -> None:
    view = torch.zeros(4, 100)[:, :60]
    assert page_runs(view.shape, view.stride(), 4) == [(0, 240)]
    assert page_runs((4, 3, 5), (100, 20, 1), 2) == [(0, 10), (40, 10), (80, 10)]
