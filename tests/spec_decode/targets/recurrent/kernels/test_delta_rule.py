"""The gated delta rule over trees equals a plain loop, and on a chain vLLM's own kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import path_to, tree_delta_rule_reference
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Heads,
    alone,
    copied,
    gates_of,
    on_cpu,
    random,
    rows_of,
    states_of,
    stock_chain_delta_rule,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import DeltaGates
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows

SIZES = [[1], [9, 1, 32, 4]]


def run(
    rows: RecurrentRows, heads: Heads, states: torch.Tensor, inputs: torch.Tensor, gates: DeltaGates
) -> torch.Tensor:
    shape = (len(inputs), heads.value_heads, heads.value)
    out = torch.zeros(shape, device=DEVICE, dtype=inputs.dtype)
    tree_recurrence(inputs, gates, states, rows, out, groups=heads.key_heads)
    return out


@pytest.mark.parametrize("heads", [Heads(), Heads(1, 3, 16, 40)])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_a_plain_loop(kind: str, sizes: list[int], heads: Heads) -> None:
    rows = rows_of(sizes, kind, padding=1)
    inputs = random(len(rows.parents), heads.dim + 8, seed=6)[:, : heads.dim]
    gates, states = gates_of(len(inputs), heads), states_of(rows, heads)
    mine = copied(states)
    found = run(rows, heads, mine, inputs, gates)
    theirs = states.cpu().clone()
    expected = tree_delta_rule_reference(
        inputs.cpu(),
        DeltaGates(*(gate.cpu() for gate in gates)),
        theirs,
        on_cpu(rows),
        key_heads=heads.key_heads,
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
    # The null block and blocks of no row stay as they were.
    used = torch.zeros(len(states), dtype=torch.bool)
    for req, size in enumerate(sizes):
        used[rows.columns[req, :size].long().cpu()] = True
    assert torch.equal(mine.cpu()[~used], states.cpu()[~used])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_has_the_bits_of_the_platform_s_kernel(dtype: torch.dtype) -> None:
    heads, rows = Heads(), rows_of([7, 1, 4], "chain", padding=1)
    inputs = random(len(rows.parents), heads.dim, seed=6)
    gates, states = gates_of(len(inputs), heads), states_of(rows, heads, dtype)
    mine, theirs = copied(states), copied(states)
    found = run(rows, heads, mine, inputs, gates)
    expected = stock_chain_delta_rule(inputs, gates, theirs, rows, heads)
    assert torch.equal(found, expected)
    assert torch.equal(mine, theirs)


def test_a_path_has_the_bits_of_a_chain_of_its_rows() -> None:
    """Each path of a tree, alone in vLLM's kernel."""
    heads, rows = Heads(), rows_of([12], "random", seed=3)
    inputs = random(12, heads.dim, seed=6)
    gates, states = gates_of(12, heads), states_of(rows, heads)
    mine = copied(states)
    found = run(rows, heads, mine, inputs, gates)
    for row in range(12):
        path = path_to(on_cpu(rows), 0, row)
        chain = alone(rows, 0, len(path))
        theirs = copied(states)
        chosen = DeltaGates(gates.decays[path], gates.betas[path], *gates[2:])
        expected = stock_chain_delta_rule(inputs[path], chosen, theirs, chain, heads)
        assert torch.equal(found[row], expected[-1])
        last = int(rows.columns[0, len(path) - 1])
        assert torch.equal(mine[int(rows.columns[0, row])], theirs[last])


def test_a_level_at_a_time_by_the_platform_s_kernel() -> None:
    """Every row a request of one token, which starts from its parent's column."""
    heads, rows = Heads(), rows_of([16, 11], "random", seed=5)
    inputs = random(27, heads.dim, seed=6)
    gates, states = gates_of(27, heads), states_of(rows, heads)
    mine, theirs = copied(states), copied(states)
    found, expected = run(rows, heads, mine, inputs, gates), torch.zeros(27, 4, 16, device=DEVICE)
    starts, parents = rows.query_start_loc.tolist(), rows.parents.tolist()
    where = [(req, row) for req in (0, 1) for row in range(starts[req + 1] - starts[req])]
    depth = [len(path_to(on_cpu(rows), starts[req], row)) for req, row in where]
    for level in range(1, max(depth) + 1):
        pairs = torch.zeros(27, 2, dtype=torch.int32)
        for place, (req, row) in enumerate(where):
            if depth[place] == level:
                parent = parents[place]
                before = parent if parent >= 0 else int(rows.num_accepted[req]) - 1
                pairs[place] = rows.columns[req, [row, before]]
        chains = RecurrentRows(
            rows.parents,
            torch.arange(28, dtype=torch.int32, device=DEVICE),
            pairs.to(DEVICE),
            torch.full((27,), 2, dtype=torch.int32, device=DEVICE),
            num_reqs=27,
        )
        out = stock_chain_delta_rule(inputs, gates, theirs, chains, heads)
        here = torch.tensor(depth, device=DEVICE) == level
        expected[here] = out[here]
    assert torch.equal(found, expected)
    assert torch.equal(mine, theirs)


def test_the_row_before_is_not_the_parent() -> None:
    """Negative control: with the row before in place of the parent, outputs differ."""
    heads, rows = Heads(), rows_of([9], "star")
    inputs = random(9, heads.dim, seed=6)
    gates, states = gates_of(9, heads), states_of(rows, heads)
    found = run(rows, heads, copied(states), inputs, gates)
    chain = torch.arange(-1, 8, dtype=torch.int32, device=DEVICE)
    spoilt = run(replace(rows, parents=chain), heads, copied(states), inputs, gates)
    assert torch.equal(found[:2], spoilt[:2])
    assert ((found[2:] - spoilt[2:]).abs().amax((1, 2)) > 0.01).all()


def test_states_that_are_not_contiguous_are_refused() -> None:
    heads, rows = Heads(), rows_of([3], "chain")
    states = states_of(rows, heads).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        run(rows, heads, states, random(3, heads.dim, seed=6), gates_of(3, heads))
