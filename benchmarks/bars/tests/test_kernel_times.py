from __future__ import annotations

import pytest
import torch

from benchmarks.bars.kernel_times import by_name, kernels_of, lines


def test_the_longest_sums_come_first() -> None:
    found = by_name([("gemm", 3.0), ("copy", 5.0), ("gemm", 4.0)])
    assert [(kernel.name, kernel.count, kernel.microseconds) for kernel in found] == [
        ("gemm", 2, 7.0),
        ("copy", 1, 5.0),
    ]
    shown = lines(found, most=1)
    assert shown[0].split() == ["12.0", "us", "3", "launches"]
    assert shown[1].split() == ["7.0", "us", "2", "x", "3.50", "gemm"]
    assert len(shown) == 2, "the sum is of all, the list of the longest"


@pytest.mark.gpu
def test_kernels_of_a_graph() -> None:
    x = torch.randn(256, 256, device="cuda")
    # cuBLAS may split a product into several kernels, so that only elementwise ones can be counted.
    x.exp().relu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.exp().relu()
    found = kernels_of(graph.replay)
    assert sum(kernel.count for kernel in found) == 2, list(map(str, found))
    assert all(kernel.microseconds > 0 for kernel in found)
