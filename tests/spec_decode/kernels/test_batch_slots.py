"""What a step's graph reads of its batch, and what is learned from the step before."""

import math

import pytest
import torch

from vllm_graft.spec_decode.kernels.batch_slots import keep_slots
from vllm_graft.spec_decode.kernels.ngram_insert import Learned
from vllm_graft.spec_decode.trees.text_state import NgramState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("num_reqs", "max_reqs"), [(0, 4), (3, 4), (4, 4), (130, 300)])
def test_slots_and_last_tokens(num_reqs: int, max_reqs: int) -> None:
    order = torch.randperm(max_reqs, device=DEVICE).int()
    drawn = torch.arange(1000, 1000 + max_reqs, device=DEVICE)[:, None]
    kept = torch.full((max_reqs,), 7, dtype=torch.int32, device=DEVICE)
    tokens = torch.full((max_reqs,), 5, device=DEVICE)
    state = NgramState.allocate(1, 4, 2, 16, DEVICE)
    state.pending[3] = torch.tensor([256, 64], device=DEVICE)
    expected = state.rates[3] + (0.25 - state.rates[3]) * (1 - math.exp(-1))
    counts = torch.tensor([9, 5], device=DEVICE)
    published = torch.zeros(2, dtype=torch.int64, pin_memory=DEVICE == "cuda")
    learned = Learned(state.pending, state.rates, counts, published)
    keep_slots(order[:num_reqs], drawn, kept, tokens, num_reqs, learned)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert published.tolist() == [9, 5]
    assert torch.allclose(state.rates[3], expected)
    assert not state.pending.any()
    assert kept[:num_reqs].tolist() == order[:num_reqs].tolist()
    assert kept[num_reqs:].tolist() == [-1] * (max_reqs - num_reqs)
    assert tokens[:num_reqs].tolist() == [1000 + slot for slot in order[:num_reqs].tolist()]
    assert tokens[num_reqs:].tolist() == [5] * (max_reqs - num_reqs)
