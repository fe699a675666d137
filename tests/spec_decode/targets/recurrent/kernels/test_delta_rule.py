"""The gated delta rule over trees equals a plain loop, and on a chain vLLM's own kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import path_to, tree_delta_rule_reference
from tests.support.samples.kept_inputs import Kept, check_folded_bits, chunk, fold
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
from vllm_graft.spec_decode.targets.recurrent.kernels.kept_rows import keep_rows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_inputs import KeptRows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import FoldTable

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


CHUNK_SIZES = [[1], [9, 1, 32, 4], [64, 17]]


@pytest.mark.parametrize("heads", [Heads(), Heads(1, 3, 24, 40)])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", CHUNK_SIZES)
def test_outputs_equal_a_plain_loop(kind: str, sizes: list[int], heads: Heads) -> None:
    rows = rows_of(sizes, kind, padding=1)
    inputs = random(len(rows.parents), heads.dim + 8, seed=6)[:, : heads.dim]
    given = Kept.of(rows, heads, inputs, gates_of(len(inputs), heads))
    before = given.states.clone()
    found = chunk(given)
    expected = tree_delta_rule_reference(
        inputs.cpu(),
        DeltaGates(*(gate.cpu() for gate in given.gates)),
        given.states.cpu().clone(),
        on_cpu(rows),
        key_heads=heads.key_heads,
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    # No state is written.
    assert torch.equal(given.states, before)


def test_the_row_before_in_a_chunk_is_not_the_parent() -> None:
    """Negative control: with the row before in place of the parent, outputs differ."""
    heads, rows = Heads(), rows_of([9], "star")
    inputs, gates = random(9, heads.dim, seed=6), gates_of(9, heads)
    found = chunk(Kept.of(rows, heads, inputs, gates))
    chain = replace(rows, parents=torch.arange(-1, 8, dtype=torch.int32, device=DEVICE))
    spoilt = chunk(Kept.of(chain, heads, inputs, gates))
    torch.testing.assert_close(found[:2], spoilt[:2])
    assert ((found[2:] - spoilt[2:]).abs().amax((1, 2)) > 0.01).all()


def test_ancestors_are_noted_by_bits() -> None:
    rows = rows_of([9, 64, 1], "random")
    kept = KeptRows.allocate(100, 80, DEVICE)
    places = torch.arange(74, device=DEVICE) + 20
    keep_rows(kept, rows, places, 64)
    for req, first in enumerate([0, 9, 73]):
        assert int(kept.firsts[20 + first]) == first
        assert int(kept.accepted[20 + first]) == int(rows.num_accepted[req])
        for row in range(int(rows.query_start_loc[req + 1]) - first):
            path = path_to(on_cpu(rows), first, row)
            # The 64th bit is the sign.
            bits = int(kept.masks[first + row]) % 2**64
            assert bits == sum(1 << each for each in path)
    assert (kept.firsts == -1).sum() == 97


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_prefix", [False, True])
def test_states_have_the_bits_of_a_chain_of_the_path(by_prefix: bool, dtype: torch.dtype) -> None:
    """Two layers, four requests: paths that are scattered or short, one that left no inputs."""
    heads, rows = Heads(), rows_of([12, 9, 3, 9], "random", seed=3)
    inputs = random(33, heads.dim, seed=6)
    layers = [
        Kept.of(rows, heads, inputs + layer, gates_of(33, heads), dtype=dtype) for layer in (0, 1)
    ]
    check_folded_bits(layers, by_prefix=by_prefix)


def test_a_request_without_a_drawn_token_keeps_its_first_row() -> None:
    heads, rows = Heads(), rows_of([3], "chain")
    given = Kept.of(rows, heads, random(3, heads.dim, seed=6), gates_of(3, heads))
    chunk(given)
    expected = given.states.clone()
    fold([given], [[0]])
    after = given.states.clone()
    given.states.copy_(expected)
    fold([given], [[]])
    assert torch.equal(given.states, after)
    assert not torch.equal(after, expected)


def test_layers_that_differ_are_refused() -> None:
    heads, rows = Heads(), rows_of([3], "chain")
    layers = [
        Kept.of(rows, heads, random(3, heads.dim, seed=6), gates_of(3, heads), dtype=dtype).folded()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    with pytest.raises(ValueError, match="alike"):
        FoldTable.build(layers, by_prefix=False)


def test_addresses_may_be_aligned_or_not() -> None:
    heads, rows = Heads(), rows_of([3], "chain")
    layer = Kept.of(rows, heads, random(3, heads.dim, seed=6), gates_of(3, heads)).folded()
    assert FoldTable.build([layer], by_prefix=False).alignment == 16
    shifted = layer._replace(states=layer.states.flatten(1)[:, 1:513].unflatten(1, (4, 8, 16)))
    assert FoldTable.build([shifted], by_prefix=False).alignment == 4
