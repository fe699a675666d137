"""Which passes over recurrent layers keep inputs in place of states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.attention.recurrent_form import allocate_inputs, keeps_inputs
from vllm_graft.spec_decode.trees.recurrent_inputs import KeptRows
from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext


def context(form: str, max_tokens: int = 64) -> TreeContext:
    shape, none = TreeShape(topk=2, steps=4, num_nodes=7), torch.device("cpu")
    workspace: Any = None
    made = TreeContext.allocate(shape, 4, max_tokens, workspace, none)
    made.recurrent_form = form
    return made


def layer() -> Any:
    conv = SimpleNamespace(weight=torch.zeros(24, 1, 4, dtype=torch.bfloat16))
    return SimpleNamespace(conv1d=conv, A_log=torch.zeros(3))


def batch(rows: int, requests: int, prompts: int = 0, padded: int | None = None) -> Any:
    uniform = rows // requests if rows % requests == 0 else None
    return SimpleNamespace(
        num_spec_decode_tokens=rows,
        num_spec_decodes=requests,
        num_actual_tokens=rows + 20 * prompts if padded is None else padded,
        num_prefills=prompts,
        num_decodes=0,
        uniform_spec_sequence_length=uniform,
        spec_state_indices_tensor=torch.zeros(requests, 8),
    )


def test_memory_is_for_the_largest_batch_of_trees() -> None:
    shared = context("auto")
    first, second = allocate_inputs(layer(), shared), allocate_inputs(layer(), shared)
    assert first is not None
    assert second is not None
    # Four requests of eight rows.
    assert (first.rows.shape, first.rows.dtype) == ((32, 24), torch.bfloat16)
    assert (first.gates.shape, first.gates.dtype) == ((32, 2, 3), torch.float32)
    assert shared.kept is not None
    assert (len(shared.kept.firsts), len(shared.kept.masks)) == (64, 32)
    assert shared.kept_bytes == 2 * (32 * 24 * 2 + 32 * 6 * 4)
    few = context("inputs", max_tokens=20)
    assert allocate_inputs(layer(), few) is not None
    assert few.kept is not None
    assert few.kept.max_rows == 20


def test_states_need_no_memory() -> None:
    shared = context("states")
    assert allocate_inputs(layer(), shared) is None
    assert shared.kept is None
    assert shared.kept_bytes == 0


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        ("auto", batch(32, 4), True),
        ("auto", batch(12, 4), False),
        ("inputs", batch(12, 4), True),
        # Requests without drafts: a state is read and written in either form.
        ("inputs", batch(4, 4), False),
        # Prompts beside trees have no place in the buffers; a graph's padding has.
        ("auto", batch(16, 2, prompts=3), True),
        ("auto", batch(16, 2, padded=40), False),
        ("auto", batch(40, 5), False),
    ],
)
def test_the_form_follows_from_the_rows(form: str, given: Any, expected: bool) -> None:
    kept = KeptRows.allocate(64, 32, "cpu")
    assert keeps_inputs(given, kept, context(form)) is expected
