from __future__ import annotations

import pytest
import torch

from vllm_graft.spec_decode.kernels.gather import path_index
from vllm_graft.spec_decode.reference import path_index_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_path(nodes: int, count: int, generator: torch.Generator) -> list[int]:
    picked = torch.randperm(nodes, generator=generator)[: count - 1] + 1
    return [0, *picked.sort().values.tolist()]


def index(
    lengths: list[int], drafts: list[int], paths: list[list[int]], padding: int, reference: bool
) -> torch.Tensor:
    device = "cpu" if reference else DEVICE
    num_reqs, tokens = len(lengths), sum(lengths) + padding
    # Entries behind the path are garbage that must not be used.
    path = torch.full((num_reqs + 1, 64), 1 << 20, dtype=torch.int32)
    for r, nodes in enumerate(paths):
        path[r, : len(nodes)] = torch.tensor(nodes)
    out = torch.full((tokens + 5,), -7, device=device)
    run = path_index_reference if reference else path_index
    run(
        path.to(device),
        torch.tensor([len(nodes) for nodes in paths], dtype=torch.int32, device=device),
        torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        torch.tensor(drafts, dtype=torch.int32, device=device),
        out,
        num_reqs,
        tokens,
    )
    return out.cpu()


@pytest.mark.parametrize("padding", [0, 300])
@pytest.mark.parametrize(
    ("lengths", "drafts"),
    [([1], [0]), ([4], [3]), ([64], [63]), ([5, 700, 1, 9, 256], [4, 0, 0, 6, 0])],
)
def test_equals_reference(lengths: list[int], drafts: list[int], padding: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    paths = [random_path(n, max(1, n // 2), generator) if n else [3] for n in drafts]
    ours = index(lengths, drafts, paths, padding, reference=False)
    assert torch.equal(ours, index(lengths, drafts, paths, padding, reference=True))


def test_accepted_rows_come_first() -> None:
    found = index([2, 6], [0, 4], [[0], [0, 2, 4]], padding=1, reference=False)
    assert found.tolist() == [0, 1, 2, 3, 5, 7, 6, 7, 8, -7, -7, -7, -7, -7]
