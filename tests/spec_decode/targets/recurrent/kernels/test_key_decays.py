"""The delta rule with decays per key over trees equals a plain loop, and on a chain vLLM's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import path_to, tree_key_decays_reference
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Heads,
    alone,
    copied,
    key_decays_of,
    on_cpu,
    random,
    rows_of,
    states_of,
    stock_chain_key_decays,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import KeyDecays
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

SIZES = [[1], [9, 1, 32, 4]]
HEADS = Heads(2, 2, 16, 16)
CHAIN = torch.arange(-1, 32, dtype=torch.int32, device=DEVICE)


def run(
    rows: RecurrentRows, states: torch.Tensor, inputs: torch.Tensor, gates: KeyDecays
) -> torch.Tensor:
    out = torch.zeros(len(inputs), *states.shape[1:3], device=DEVICE, dtype=inputs.dtype)
    tree_recurrence(inputs, gates, states, rows, out, groups=states.shape[1])
    return out


@pytest.mark.parametrize(
    ("heads", "lower_bound"), [(HEADS, None), (HEADS, -5.0), (Heads(1, 1, 24, 40), None)]
)
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_a_plain_loop(
    kind: str, sizes: list[int], heads: Heads, lower_bound: float | None
) -> None:
    rows = rows_of(sizes, kind, padding=1)
    inputs = random(len(rows.parents), heads.dim + 8, seed=6)[:, : heads.dim]
    gates = key_decays_of(len(inputs), heads, lower_bound=lower_bound)
    states = states_of(rows, heads)
    mine = copied(states)
    found = run(rows, mine, inputs, gates)
    theirs = states.cpu().clone()
    expected = tree_key_decays_reference(
        inputs.cpu(),
        KeyDecays(*(gate.cpu() for gate in gates[:4]), lower_bound),
        theirs,
        on_cpu(rows),
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
    # The null block and blocks of no row stay as they were.
    used = torch.zeros(len(states), dtype=torch.bool)
    for req, size in enumerate(sizes):
        used[rows.columns[req, :size].long().cpu()] = True
    assert torch.equal(mine.cpu()[~used], states.cpu()[~used])


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_has_the_bits_of_the_platform_s_kernel(
    dtype: torch.dtype, lower_bound: float | None
) -> None:
    rows = rows_of([7, 1, 4], "chain", padding=1)
    inputs = random(len(rows.parents), HEADS.dim, seed=6)
    gates = key_decays_of(len(inputs), HEADS, lower_bound=lower_bound)
    states = states_of(rows, HEADS, dtype)
    mine, theirs = copied(states), copied(states)
    found = run(rows, mine, inputs, gates)
    assert torch.equal(found, stock_chain_key_decays(inputs, gates, theirs, rows))
    assert torch.equal(mine, theirs)


def test_a_path_has_the_bits_of_a_chain_of_its_rows() -> None:
    """Each path of a tree, alone in vLLM's kernel."""
    rows = rows_of([12], "random", seed=3)
    inputs, gates = random(12, HEADS.dim, seed=6), key_decays_of(12, HEADS)
    states = states_of(rows, HEADS)
    mine = copied(states)
    found = run(rows, mine, inputs, gates)
    for row in range(12):
        path = path_to(on_cpu(rows), 0, row)
        chain = alone(rows, 0, len(path))
        theirs = copied(states)
        chosen = gates._replace(decays=gates.decays[path], betas=gates.betas[path])
        expected = stock_chain_key_decays(inputs[path], chosen, theirs, chain)
        assert torch.equal(found[row], expected[-1])
        last = int(rows.columns[0, len(path) - 1])
        assert torch.equal(mine[int(rows.columns[0, row])], theirs[last])


def test_each_key_has_a_decay_of_its_own() -> None:
    """Negative control: with the mean decay of a head, as the gated delta rule has, all differ."""
    rows = rows_of([9], "random")
    inputs, gates = random(9, HEADS.dim, seed=6), key_decays_of(9, HEADS)
    states = states_of(rows, HEADS)
    found = run(rows, copied(states), inputs, gates)
    mean = gates.decays.mean(-1, keepdim=True).expand_as(gates.decays).contiguous()
    spoilt = run(rows, copied(states), inputs, gates._replace(decays=mean))
    assert ((found - spoilt).abs().amax((1, 2)) > 0.01).all()


def test_the_row_before_is_not_the_parent() -> None:
    """Negative control: with the row before in place of the parent, outputs differ."""
    rows = rows_of([9], "star")
    inputs, gates = random(9, HEADS.dim, seed=6), key_decays_of(9, HEADS)
    states = states_of(rows, HEADS)
    found = run(rows, copied(states), inputs, gates)
    spoilt = run(replace(rows, parents=CHAIN[:9]), copied(states), inputs, gates)
    assert torch.equal(found[:2], spoilt[:2])
    assert ((found[2:] - spoilt[2:]).abs().amax((1, 2)) > 0.01).all()


def test_states_that_are_not_contiguous_are_refused() -> None:
    rows = rows_of([3], "chain")
    states = states_of(rows, HEADS).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        run(rows, states, random(3, HEADS.dim, seed=6), key_decays_of(3, HEADS))
