from __future__ import annotations

import pytest
import torch

from tests.support.references.tree_reference import follow_path_reference
from vllm_graft.spec_decode.kernels.compact import TokenRows, follow_path

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


@pytest.mark.parametrize("padding", [0, 300])
@pytest.mark.parametrize("width", [24, 1500])
@pytest.mark.parametrize(
    ("lengths", "drafts"),
    [([1], [0]), ([4], [3]), ([64], [63]), ([5, 700, 1, 9, 256], [4, 0, 0, 6, 0])],
)
def test_equals_reference(lengths: list[int], drafts: list[int], padding: int, width: int) -> None:
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


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows, narrow = token_rows(4, 24, DEVICE), token_rows(4, 16, DEVICE)
    few = token_rows(3, 24, DEVICE)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for into, words in ((narrow, "16"), (few, "must have 4 rows"), (rows, "")):
        arguments = (none[None], none, torch.tensor([0, 4], device=DEVICE).int(), none, rows, into)
        if not words:
            follow_path(*arguments, num_reqs=0, num_tokens=0, max_reqs=1)
            continue
        with pytest.raises(ValueError, match=words):
            follow_path(*arguments, num_reqs=1, num_tokens=4, max_reqs=1)
