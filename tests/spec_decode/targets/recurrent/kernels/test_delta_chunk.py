"""Outputs of a tree as one chunk equal a plain loop, and accepted paths leave a chain's states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import path_to, tree_delta_rule_reference
from tests.support.samples.kept_inputs import Kept, check_folded_bits, chunk, fold
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Heads,
    gates_of,
    on_cpu,
    random,
    rows_of,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import DeltaGates
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrent_rows import KeptRows, keep_rows
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import FoldTable

SIZES = [[1], [9, 1, 32, 4], [64, 17]]


@pytest.mark.parametrize("heads", [Heads(), Heads(1, 3, 24, 40)])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", SIZES)
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


def test_the_row_before_is_not_the_parent() -> None:
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
