"""Prompts of one token that vLLM pads with placeholders for drafts start from a state of zeros."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import RecurrentCache, StateTable
from vllm_graft.spec_decode.targets.recurrent.recurrent_family import RecurrentState


def state() -> RecurrentState:
    blocks = torch.arange(1, 13, dtype=torch.int32).view(3, 4)
    cache = RecurrentCache(torch.ones(13, 8, 5), torch.ones(13, 2, 4, 4), 4, blocks, 16)
    return RecurrentState([cache], StateTable.build([cache], by_prefix=False))


def step(drafts: list[int] | None, as_decodes: list[bool] | None) -> Any:
    batch = SimpleNamespace(
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts),
        prefill_runs_as_decode_np=None if as_decodes is None else np.array(as_decodes),
        is_prefilling_np=np.array([False, True, True]),
        seq_lens=torch.tensor([20, 4, 9]),
    )
    return SimpleNamespace(batch=batch)


def test_a_padded_prompt_is_verified_from_zeros() -> None:
    found, given = state(), step([3, 3, 3], [False, False, True])
    found.fork(given)
    assert given.batch.prefill_runs_as_decode_np.tolist() == [False, True, True]
    [cache] = found.caches
    empty = [
        not cache.states[block].any() and not cache.windows[block].any() for block in range(13)
    ]
    # Request 1 has blocks 5 to 8; request 2 goes on from a state that it has.
    assert [block for block in range(13) if empty[block]] == [5]


@pytest.mark.parametrize(
    ("drafts", "as_decodes"),
    [
        (None, [False] * 3),
        ([3, 3, 3], None),
        ([3, 0, 0], [False] * 3),
        ([3, 3, 3], [False, True, True]),
    ],
)
def test_others_stay_as_they_are(drafts: list[int] | None, as_decodes: list[bool] | None) -> None:
    found, given = state(), step(drafts, as_decodes)
    found.fork(given)
    kept = given.batch.prefill_runs_as_decode_np
    assert (kept if as_decodes is None else kept.tolist()) == as_decodes
    assert found.caches[0].states.all()
