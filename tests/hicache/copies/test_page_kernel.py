"""The kernel that copies runs, in Triton's interpreter; test_copy_streams_gpu.py has the GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_graft.hicache.copies.page_kernel import fits, launch
from vllm_graft.hicache.pages.layout import Copies, LayerPages, copies, layer_copies
from vllm_graft.testing import compile_cases


def _runs(sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, Copies]:
    """Make source bytes, a target, and runs that leave gaps between them."""
    source = torch.randint(0, 256, (sum(sizes) + 64 * len(sizes),), dtype=torch.uint8)
    target = torch.zeros_like(source)
    starts = np.cumsum([0, *sizes[:-1]]) + 64 * np.arange(len(sizes))
    lengths = np.asarray(sizes, dtype=np.int64)
    return source, target, Copies(target.data_ptr() + starts, source.data_ptr() + starts, lengths)


def test_runs_of_a_range_arrive_and_no_other_byte_changes() -> None:
    sizes = [16, 64, 40_000, 32_768, 4096, 48]
    source, target, runs = _runs(sizes)
    table = torch.from_numpy(np.stack([runs.host, runs.device, runs.sizes // 8]))
    launch(table, 1, 5)
    expected = torch.zeros_like(target)
    for at, size in list(zip(runs.host - source.data_ptr(), sizes))[1:5]:
        expected[at : at + size] = source[at : at + size]
    assert torch.equal(target, expected)
    launch(table, 3, 3)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(("change", "fit"), [(0, True), (8, False), (16, True)])
def test_what_is_not_aligned_is_left_to_copy_engines(change: int, fit: bool) -> None:
    aligned = np.asarray([4096, 8192], dtype=np.int64)
    for column in range(3):
        columns = [aligned, aligned, aligned]
        columns[column] = aligned + change
        assert fits(Copies(*columns)) is fit
    assert fits(Copies(*[aligned[:0]] * 3))


def test_layers_come_one_after_the_other() -> None:
    layers = [
        LayerPages("layers.0", 1000, 100, ((0, 0, 16), (50, 16, 32))),
        LayerPages("layers.1", 5000, 200, ((0, 48, 64),)),
    ]
    other = [LayerPages("mamba", 9000, 10, ((0, 0, 8),))]
    found, ranges = layer_copies([(layers, [3, 1], [0, 2]), (other, [7], [1])], 4096, 1 << 20)
    assert ranges == {"layers.0": (0, 4), "layers.1": (4, 6), "mamba": (6, 7)}
    assert found.device.tolist() == [1300, 1100, 1350, 1150, 5600, 5200, 9070]
    slots = [slot * 4096 + (1 << 20) for slot in (0, 2, 0, 2, 0, 2, 1)]
    offsets = [0, 0, 16, 16, 48, 48, 0]
    assert found.host.tolist() == [slot + offset for slot, offset in zip(slots, offsets)]
    assert found.sizes.tolist() == [16, 16, 32, 32, 64, 64, 8]
    whole = copies(layers, [3, 1], [0, 2], 4096, 1 << 20, 8)
    assert whole.num_bytes == found.num_bytes - 8


@pytest.mark.slow
def test_it_compiles() -> None:
    outcomes = compile_cases(Path(__file__).with_name("page_kernel_cases.py"))
    assert {outcome.capability for outcome in outcomes} == {80, 90, 100}
    assert [outcome for outcome in outcomes if outcome.error] == []
