"""The selective state update over trees equals a plain loop, and on a chain vLLM's own kernel."""

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import tree_selective_update_reference
from tests.support.samples.recurrent_samples import (
    DEVICE,
    alone,
    copied,
    deepest,
    on_cpu,
    random,
    rows_of,
    triton_selective_update,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.chunk import tree_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    KeptRows,
    LayerInputs,
    RecurrentRows,
    SelectiveGates,
    keep_rows,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import (
    FoldedLayer,
    FoldTable,
    fold_states,
)

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


def chunk(
    rows: RecurrentRows, inputs: torch.Tensor, gates: SelectiveGates, states: torch.Tensor
) -> tuple[torch.Tensor, KeptRows, LayerInputs]:
    """Outputs, and what is kept."""
    count, most = len(inputs), int(rows.query_start_loc.diff().max())
    kept = KeptRows.allocate(count, count, DEVICE)
    keep_rows(kept, rows, None, most)
    layer = LayerInputs(inputs, torch.zeros(count, 1, HEADS, device=DEVICE))
    out = torch.zeros(count, HEADS, VALUE, device=DEVICE)
    tree_chunk(inputs, gates, states, rows, kept, layer.gates, out, groups=GROUPS, max_rows=most)
    return out, kept, layer


@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", [[1], [9, 1, 32, 4], [64, 17]])
def test_outputs_equal_a_plain_loop(kind: str, sizes: list[int]) -> None:
    rows = rows_of(sizes, kind, padding=1)
    inputs, gates, states = problem(rows)
    mine = copied(states)
    found, _, layer = chunk(rows, inputs, gates, mine)
    expected = tree_selective_update_reference(
        inputs.cpu(),
        SelectiveGates(*(gate.cpu() for gate in gates)),
        states.cpu().clone(),
        on_cpu(rows),
        groups=GROUPS,
    )
    # Along a chain outputs cancel out, so the largest one tells how exact they are.
    near = 1e-5 * max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=near)
    # No state is written.
    assert torch.equal(mine, states)
    used = int(rows.query_start_loc[-1])
    assert torch.equal(layer.gates[:used, 0], gates.steps[:used])


def test_the_row_before_is_not_the_parent() -> None:
    """Negative control: with the row before in place of the parent, outputs differ."""
    rows = rows_of([9], "star")
    inputs, gates, states = problem(rows)
    found = chunk(rows, inputs, gates, states)[0]
    chain = replace(rows, parents=torch.arange(-1, 8, dtype=torch.int32, device=DEVICE))
    spoilt = chunk(chain, inputs, gates, states)[0]
    torch.testing.assert_close(found[:2], spoilt[:2])
    assert ((found[2:] - spoilt[2:]).abs().amax((1, 2)) > 0.01).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_have_the_bits_of_a_chain_of_the_path(dtype: torch.dtype) -> None:
    rows = rows_of([12, 9], "random", seed=3)
    inputs, gates, states = problem(rows, dtype)
    before, mine = copied(states), copied(states)
    _, kept, layer = chunk(rows, inputs, gates, mine)
    paths = [deepest(rows, first, size) for first, size in ((0, 12), (12, 9))]
    assert all(path != list(range(len(path))) for path in paths)
    folded = FoldedLayer(
        layer, mine, gates.rates, gates.step_bias, GROUPS, rows.columns, 64, decay=Decay.SELECTIVE
    )
    given = torch.zeros(2, 13, dtype=torch.int32)
    for req, path in enumerate(paths):
        given[req, : len(path)] = torch.tensor(path)
    fold_states(
        FoldTable.build([folded], by_prefix=False),
        kept,
        rows.query_start_loc,
        given.to(DEVICE),
        torch.tensor([len(path) for path in paths], dtype=torch.int32, device=DEVICE),
        torch.full((2,), 40, dtype=torch.int32, device=DEVICE),
        num_reqs=2,
    )
    changed = torch.zeros(len(mine), dtype=torch.bool)
    for req, (first, path) in enumerate(zip((0, 12), paths)):
        lines, theirs = [first + node for node in path], copied(before)
        chain = alone(rows, req, len(path))
        chosen = SelectiveGates(gates.steps[lines], *gates[1:])
        out = torch.zeros(len(path), HEADS, VALUE, device=DEVICE)
        triton_selective_update(inputs[lines], chosen, theirs, chain, out, groups=GROUPS)
        column = int(rows.columns[req, len(path) - 1])
        assert torch.equal(mine[column], theirs[column])
        assert not torch.equal(mine[column], before[column])
        changed[column] = True
    assert torch.equal(mine[~changed], before[~changed])
