"""What a step's graph reads of its batch."""

import pytest
import torch

from vllm_graft.spec_decode.kernels.batch_slots import keep_slots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("num_reqs", "max_reqs"), [(0, 4), (3, 4), (4, 4), (130, 300)])
def test_slots_and_last_tokens(num_reqs: int, max_reqs: int) -> None:
    order = torch.randperm(max_reqs, device=DEVICE).int()
    drawn = torch.arange(1000, 1000 + max_reqs, device=DEVICE)[:, None]
    kept = torch.full((max_reqs,), 7, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((max_reqs,), 5, device=DEVICE)
    keep_slots(order[:num_reqs], drawn, kept, tokens, num_reqs)
    assert kept[:num_reqs].tolist() == order[:num_reqs].tolist()
    assert kept[num_reqs:].tolist() == [-1] * (max_reqs - num_reqs)
    assert tokens[:num_reqs].tolist() == [1000 + slot for slot in order[:num_reqs].tolist()]
    assert tokens[num_reqs:].tolist() == [5] * (max_reqs - num_reqs)
