"""Which passes over recurrent layers keep inputs in place of states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import KeptRows
from vllm_graft.spec_decode.targets.recurrent.recurrent_layer import (
    Batch,
    allocate_inputs,
    keeps_inputs,
)
from vllm_graft.spec_decode.trees.shape import TreeShape
from vllm_graft.spec_decode.verification.context import TreeContext


def context(form: str, max_tokens: int = 64) -> TreeContext:
    shape, none = TreeShape(topk=2, steps=4, num_nodes=7), torch.device("cpu")
    workspace: Any = None
    made = TreeContext.allocate(shape, 4, max_tokens, workspace, none)
    made.recurrent_form = form
    return made


WEIGHT = torch.zeros(24, 1, 4, dtype=torch.bfloat16)


def batch(rows: int, requests: int, padded: int = 0) -> Batch:
    return Batch(rows, requests, -(-rows // requests), padded)


def test_memory_is_for_the_largest_batch_of_trees() -> None:
    shared = context("auto")
    first, second = (allocate_inputs(WEIGHT, (gates, 3), shared) for gates in (2, 1))
    # Four requests of eight rows.
    assert (first.rows.shape, first.rows.dtype) == ((32, 24), torch.bfloat16)
    assert (first.gates.shape, first.gates.dtype) == ((32, 2, 3), torch.float32)
    assert second.gates.shape == (32, 1, 3)
    assert shared.kept is not None
    assert (len(shared.kept.firsts), len(shared.kept.masks)) == (64, 32)
    assert shared.kept_bytes == 2 * 32 * 24 * 2 + 32 * 9 * 4
    few = context("inputs", max_tokens=20)
    assert len(allocate_inputs(WEIGHT, (2, 3), few).rows) == 20
    assert few.kept is not None
    assert few.kept.max_rows == 20


@pytest.mark.parametrize(
    ("form", "given", "expected"),
    [
        ("auto", batch(32, 4), True),
        ("auto", batch(12, 4), False),
        ("inputs", batch(12, 4), True),
        # Requests without drafts: a state is read and written in either form.
        ("inputs", batch(4, 4), False),
        # A graph's padding has rows in the buffers, too.
        ("auto", batch(16, 2, padded=32), True),
        ("auto", batch(16, 2, padded=40), False),
        ("inputs", batch(65, 1), False),
        ("auto", batch(40, 5), False),
    ],
)
def test_the_form_follows_from_the_rows(form: str, given: Any, expected: bool) -> None:
    shared = context(form)
    assert not keeps_inputs(given, shared)
    shared.kept = KeptRows.allocate(64, 32, "cpu")
    assert keeps_inputs(given, shared) is expected
