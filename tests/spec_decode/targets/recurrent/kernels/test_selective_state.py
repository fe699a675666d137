"""The selective state update over trees equals a plain loop, and on a chain vLLM's own kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import tree_selective_update_reference
from tests.support.samples.recurrent_samples import (
    DEVICE,
    copied,
    random,
    rows_of,
    triton_selective_update,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import SelectiveGates
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

HEADS, GROUPS, VALUE, SIZE = 4, 2, 24, 16
DIM = HEADS * VALUE + 2 * GROUPS * SIZE


def problem(
    rows: RecurrentRows, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, SelectiveGates, torch.Tensor]:
    count, blocks = len(rows.parents), int(rows.columns.max()) + 1
    inputs = random(count, DIM + 8, seed=6)[:, :DIM]
    gates = SelectiveGates(
        random(count, HEADS + 3, seed=11)[:, :HEADS],
        -random(HEADS, seed=12).exp(),
        random(HEADS, seed=13),
        random(HEADS, seed=14),
    )
    pages = random(blocks, HEADS * VALUE * SIZE + 64, seed=5, dtype=dtype)
    states = pages[:, : HEADS * VALUE * SIZE].unflatten(1, (HEADS, VALUE, SIZE))
    return inputs, gates, states


def run(
    rows: RecurrentRows, inputs: torch.Tensor, gates: SelectiveGates, states: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(len(inputs), HEADS, VALUE, device=DEVICE)
    tree_recurrence(inputs, gates, states, rows, out, groups=GROUPS)
    return out


@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", [[1], [9, 1, 32, 4]])
def test_equals_a_plain_loop(kind: str, sizes: list[int]) -> None:
    rows = rows_of(sizes, kind, padding=1)
    inputs, gates, states = problem(rows)
    mine, theirs = copied(states), states.cpu().clone()
    found = run(rows, inputs, gates, mine)
    expected = tree_selective_update_reference(
        inputs.cpu(),
        SelectiveGates(*(gate.cpu() for gate in gates)),
        theirs,
        replace(rows, **{k: v.cpu() for k, v in vars(rows).items() if k != "num_reqs"}),
        groups=GROUPS,
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["chain", "star"])
def test_a_chain_has_the_bits_of_the_platform_s_kernel(kind: str, dtype: torch.dtype) -> None:
    """And a tree of other rows has not: the negative control."""
    rows = rows_of([7, 1, 4], kind, padding=1)
    inputs, gates, states = problem(rows, dtype)
    mine, theirs = copied(states), copied(states)
    found = run(rows, inputs, gates, mine)
    expected = torch.zeros_like(found)
    triton_selective_update(inputs, gates, theirs, rows, expected, groups=GROUPS)
    # It writes what it computes for padding, too.
    used = int(rows.query_start_loc[-1])
    assert torch.equal(found[:used], expected[:used]) is (kind == "chain")
    assert torch.equal(mine[1:], theirs[1:]) is (kind == "chain")


def test_states_that_are_not_contiguous_are_refused() -> None:
    rows = rows_of([3], "chain")
    inputs, gates, states = problem(rows)
    with pytest.raises(ValueError, match="contiguous"):
        run(rows, inputs, gates, states.transpose(2, 3))
