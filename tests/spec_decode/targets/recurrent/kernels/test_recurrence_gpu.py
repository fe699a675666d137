"""The compiled kernels at the sizes of published models: float32 states, trees of 1 to 32 rows."""

import pytest
import torch

from tests.support.references.recurrence_reference import (
    tree_conv_reference,
    tree_selective_update_reference,
)
from tests.support.samples.kept_inputs import Kept, chunk, fold, stock_chain
from tests.support.samples.recurrent_samples import (
    Heads,
    Rule,
    alone,
    deepest,
    key_decays_of,
    on_cpu,
    random,
    rows_of,
    stock_chain_conv,
    triton_selective_update,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.chunk import tree_chunk
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    Decay,
    KeptRows,
    KeyDecays,
    LayerInputs,
    RecurrentRows,
    SelectiveGates,
    keep_rows,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_conv, tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import (
    FoldedLayer,
    FoldTable,
    fold_states,
)

pytestmark = pytest.mark.gpu

HEADS = Heads(16, 32, 128, 128)
WIDTH = 4
SIZES = [[32, 1, 17, 8, 5], [8] * 4]


DELTA, KEYS = Rule(HEADS), Rule(Heads(32, 32, 128, 128), by_key=True)
"""The second one has the sizes of Kimi Linear: 32 heads of 128."""

FEW = Rule(Heads(8, 8, 128, 128), by_key=True)


def states_of(rows: RecurrentRows) -> torch.Tensor:
    return random(int(rows.columns.max()) + 1, HEADS.value_heads, 128, 128, seed=5) * 0.1


@pytest.mark.parametrize("rule", [DELTA, KEYS, KEYS._replace(lower_bound=-5.0)])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rules(dtype: torch.dtype, sizes: list[int], kind: str, rule: Rule) -> None:
    rows = rows_of(sizes, kind, padding=2)
    inputs = random(len(rows.parents), rule.heads.dim, seed=6, dtype=dtype)
    gates, states = rule.gates(len(inputs), dtype), states_of(rows)
    mine, theirs, expected_states = states.clone(), states.clone(), states.cpu().clone()
    found = torch.zeros(len(inputs), 32, 128, device="cuda", dtype=dtype)
    tree_recurrence(inputs, gates, mine, rows, found, groups=rule.heads.key_heads)
    expected = rule.looped(inputs, gates, expected_states, rows)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=near, atol=near)
    torch.testing.assert_close(mine.cpu(), expected_states, rtol=1e-5, atol=1e-5)
    chains = rule.stock(inputs, gates, theirs, rows)
    same = torch.equal(found, chains) and torch.equal(mine, theirs)
    if kind != "chain":
        assert not same
    elif dtype == torch.float32:
        assert same
    else:
        # In 16 bits a compiler may fuse a product and a sum in one kernel and not in the other.
        torch.testing.assert_close(found, chains, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        *((DELTA, sizes) for sizes in (*SIZES, [64, 33])),
        (FEW, SIZES[0]),
        (FEW._replace(lower_bound=-5.0), SIZES[1]),
        (FEW, [63, 33]),
    ],
)
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks(dtype: torch.dtype, kind: str, rule: Rule, sizes: list[int]) -> None:
    """Outputs without a state per row, then states of accepted paths with the bits of a chain."""
    rows = rows_of(sizes, kind, padding=2)
    inputs = random(len(rows.parents), rule.heads.dim, seed=6, dtype=dtype)
    given = Kept.of(rows, rule.heads, inputs, rule.gates(len(inputs), dtype))
    given.states *= 0.2
    check_chunk(given)
    check_folds(given, sizes)


def check_chunk(given: Kept) -> None:
    """Outputs equal a plain loop's, and no state is written."""
    before = given.states.clone()
    found = chunk(given)
    assert torch.equal(given.states, before)
    expected = Rule(given.heads).looped(
        given.inputs.rows, given.gates, before.cpu().clone(), given.rows
    )
    near = 1e-5 if given.inputs.rows.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=near, atol=near)


def check_folds(given: Kept, sizes: list[int]) -> None:
    """Fold the deepest path of each request; its state is vLLM's of a chain of the path."""
    rows, before = given.rows, given.states.clone()
    starts = rows.query_start_loc.tolist()
    paths = [deepest(rows, starts[req], size) for req, size in enumerate(sizes)]
    fold([given], [*paths, [0], [0]])
    after, changed = given.states.clone(), torch.zeros(len(before), dtype=torch.bool)
    for req, path in enumerate(paths):
        lines, theirs = [starts[req] + node for node in path], before.clone()
        stock_chain(given, lines, theirs, alone(rows, req, len(path)))
        column = int(rows.columns[req, len(path) - 1])
        changed[column] = True
        if given.inputs.rows.dtype == torch.float32:
            assert torch.equal(after[column], theirs[column])
        else:
            # A compiler may fuse a product and a sum in one kernel and not in the other.
            torch.testing.assert_close(after[column], theirs[column], rtol=1e-5, atol=1e-5)
    assert torch.equal(after[~changed], before[~changed])


@pytest.mark.parametrize("kind", ["random", "chain"])
def test_key_decay_chunk_with_strong_decays(kind: str) -> None:
    """Logarithms of decays of -20 for 40 rows of 63, weak ones behind them and beside them."""
    heads = Heads(4, 4, 128, 128)
    rows = rows_of([63], kind)
    decays = torch.full((63, 4, 128), 20.0)
    decays[40:] = -3.5
    decays[:, :, ::2] = -6.0
    gates = key_decays_of(63, heads)
    zeros = [torch.zeros_like(each) for each in (gates.log_rates, gates.decay_bias)]
    strong = KeyDecays(decays.cuda(), gates.betas, *zeros, None)
    given = Kept.of(rows, heads, random(63, heads.dim, seed=6), strong)
    given.states *= 0.2
    check_chunk(given)


@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(dtype: torch.dtype, kind: str) -> None:
    rows = rows_of(SIZES[0], kind, padding=2)
    slots = WIDTH - 2 + rows.columns.shape[1]
    windows = random(int(rows.columns.max()) + 1, slots, HEADS.dim, seed=1, dtype=dtype)
    windows = windows.transpose(1, 2)
    inputs = random(len(rows.parents), HEADS.dim, seed=2, dtype=dtype)
    weights = random(HEADS.dim, WIDTH, seed=3, dtype=dtype)
    mine, theirs = windows.clone(), windows.clone()
    found = tree_conv(inputs, mine, weights, None, rows, silu=True)
    expected_windows = windows.cpu().clone()
    expected = tree_conv_reference(
        inputs.cpu(), expected_windows, weights.cpu(), None, on_cpu(rows), silu=True
    )
    near = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=near, atol=near)
    assert torch.equal(mine.cpu(), expected_windows)
    chains = stock_chain_conv(inputs, theirs, weights, None, rows)
    assert torch.equal(mine, theirs)
    assert torch.equal(found, chains) is (kind == "chain")


MAMBA = 64, 8, 64, 128
"""The sizes of Nemotron-H: 64 heads of 64, 8 groups, 128 numbers per dimension."""


def selective_problem(
    rows: RecurrentRows, dtype: torch.dtype
) -> tuple[torch.Tensor, SelectiveGates, torch.Tensor]:
    """Inputs, gates and states of a layer of Mamba-2."""
    heads, groups, value, size = MAMBA
    count, blocks = len(rows.parents), int(rows.columns.max()) + 1
    gates = SelectiveGates(
        random(count, heads, seed=11, dtype=dtype),
        -random(heads, seed=12).exp(),
        random(heads, seed=13, dtype=dtype),
        random(heads, seed=14, dtype=dtype),
    )
    inputs = random(count, heads * value + 2 * groups * size, seed=6, dtype=dtype)
    return inputs, gates, random(blocks, heads, value, size, seed=5) * 0.1


@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_update(dtype: torch.dtype, kind: str) -> None:
    heads, groups, value, _ = MAMBA
    rows = rows_of(SIZES[0], kind, padding=2)
    count = len(rows.parents)
    inputs, gates, states = selective_problem(rows, dtype)
    mine, theirs, expected_states = states.clone(), states.clone(), states.cpu().clone()
    found = torch.zeros(count, heads, value, device="cuda", dtype=dtype)
    tree_recurrence(inputs, gates, mine, rows, found, groups=groups)
    expected = tree_selective_update_reference(
        inputs.cpu(),
        SelectiveGates(*(gate.cpu() for gate in gates)),
        expected_states,
        on_cpu(rows),
        groups=groups,
    )
    # An output sums 128 products of numbers up to about 10.
    near = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=near, atol=10 * near)
    torch.testing.assert_close(mine.cpu(), expected_states, rtol=1e-5, atol=1e-4)
    chains = torch.zeros_like(found)
    triton_selective_update(inputs, gates, theirs, rows, chains, groups=groups)
    used = int(rows.query_start_loc[-1])
    same = torch.equal(mine[1:], theirs[1:])
    if kind != "chain":
        assert not same
        return
    if dtype == torch.float32:
        assert same
    else:
        # In 16 bits a compiler may fuse a product and a sum in one kernel and not in the other.
        torch.testing.assert_close(mine[1:], theirs[1:], rtol=1e-5, atol=1e-5)
    # Its tiles have another size, so that sums may be rounded otherwise.
    torch.testing.assert_close(found[:used], chains[:used], rtol=near, atol=10 * near)


@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_chunk(dtype: torch.dtype, kind: str) -> None:
    """Trees of up to 64 rows: outputs without a state per row."""
    heads, groups, value, _ = MAMBA
    rows = rows_of([64, 17, 8, 1], kind, padding=2)
    count = len(rows.parents)
    inputs, gates, states = selective_problem(rows, dtype)
    mine, found = states.clone(), torch.zeros(count, heads, value, device="cuda", dtype=dtype)
    kept = KeptRows.allocate(count, count, "cuda")
    keep_rows(kept, rows, None, 64)
    layer = LayerInputs(inputs, torch.zeros(count, 1, heads, device="cuda"))
    tree_chunk(inputs, gates, mine, rows, kept, layer.gates, found, groups=groups, max_rows=64)
    assert torch.equal(mine, states)
    expected = tree_selective_update_reference(
        inputs.cpu(),
        SelectiveGates(*(gate.cpu() for gate in gates)),
        states.cpu().clone(),
        on_cpu(rows),
        groups=groups,
    )
    # Along a chain outputs cancel out, so the largest one tells how exact they are.
    near = (1e-5 if dtype == torch.float32 else 1e-2) * float(expected.abs().max())
    torch.testing.assert_close(found.float().cpu(), expected, rtol=0, atol=near)
    path = deepest(rows, 0, 64)
    folded = FoldedLayer(
        layer, mine, gates.rates, gates.step_bias, groups, rows.columns, 64, decay=Decay.SELECTIVE
    )
    counts = torch.tensor([len(path), 1, 1, 1, 1, 1], dtype=torch.int32, device="cuda")
    paths = torch.zeros(6, 64, dtype=torch.int32)
    paths[0, : len(path)] = torch.tensor(path)
    starts = rows.query_start_loc
    table = FoldTable.build([folded], by_prefix=False)
    fold_states(table, kept, starts, paths.cuda(), counts, counts, num_reqs=6)
    chain = alone(rows, 0, len(path))
    theirs, out = states.clone(), torch.zeros(len(path), heads, value, device="cuda", dtype=dtype)
    chosen = SelectiveGates(gates.steps[path], *gates[1:])
    triton_selective_update(inputs[path], chosen, theirs, chain, out, groups=groups)
    column = int(rows.columns[0, len(path) - 1])
    assert not torch.equal(mine[column], states[column])
    if dtype == torch.float32:
        assert torch.equal(mine[column], theirs[column])
    else:
        # A compiler may fuse a product and a sum in one kernel and not in the other.
        torch.testing.assert_close(mine[column], theirs[column], rtol=1e-5, atol=1e-5)
