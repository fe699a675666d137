"""The compiled kernels at the sizes of published models: float32 states, trees of 1 to 32 rows."""

import pytest
import torch

from tests.support.references.recurrence_reference import tree_conv_reference
from tests.support.samples.kept_inputs import Kept, chunk, fold, stock_chain
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Heads,
    Rule,
    alone,
    deepest,
    key_decays_of,
    on_cpu,
    random,
    rows_of,
    stock_chain_conv,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import KeyDecays, SelectiveGates
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_conv, tree_recurrence

pytestmark = pytest.mark.gpu

HEADS = Heads(16, 32, 128, 128)
WIDTH = 4
SIZES = [[32, 1, 17, 8, 5], [8] * 4]


DELTA, KEYS = Rule(HEADS), Rule(Heads(32, 32, 128, 128), by_key=True)
"""The second one has the sizes of Kimi Linear: 32 heads of 128."""

FEW = Rule(Heads(8, 8, 128, 128), by_key=True)
MAMBA = Rule(Heads(8, 64, 128, 64), selective=True)
"""The sizes of Nemotron-H: 64 heads of 64, 8 groups, 128 numbers per dimension."""


@pytest.mark.parametrize("rule", [DELTA, KEYS, KEYS._replace(lower_bound=-5.0), MAMBA])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(dtype: torch.dtype, sizes: list[int], kind: str, rule: Rule) -> None:
    rows, shape = rows_of(sizes, kind, padding=2), (rule.heads.value_heads, rule.heads.value)
    inputs = random(len(rows.parents), rule.heads.dim, seed=6, dtype=dtype)
    blocks, gates = int(rows.columns.max()) + 1, rule.gates(len(inputs), dtype)
    states = random(blocks, *shape, rule.heads.key, seed=5) * 0.1
    mine, theirs, expected_states = states.clone(), states.clone(), states.cpu().clone()
    found = inputs.new_zeros(len(inputs), *shape)
    tree_recurrence(inputs, gates, mine, rows, found, groups=rule.heads.key_heads)
    expected = rule.looped(inputs, gates, expected_states, rows)
    # Mamba's outputs sum 128 products of numbers up to about 10.
    near, far = (1e-4, 10) if rule.selective else (1e-5, 1)
    near = near if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float().cpu(), expected, rtol=near, atol=far * near)
    torch.testing.assert_close(mine.cpu(), expected_states, rtol=1e-5, atol=far * 1e-5)
    chains = rule.stock(inputs, gates, theirs, rows)
    same = torch.equal(found, chains)
    if rule.selective:
        # VLLM's kernel writes what it computes for padding, too, and its tiles have another size,
        # so that sums may be rounded otherwise.
        used, same = int(rows.query_start_loc[-1]), True
        found, chains, mine, theirs = found[:used], chains[:used], mine[1:], theirs[1:]
    same = same and torch.equal(mine, theirs)
    if kind != "chain":
        assert not same
        return
    if dtype == torch.float32:
        assert same
    # In 16 bits a compiler may fuse a product and a sum in one kernel and not in the other.
    torch.testing.assert_close(found, chains, rtol=near, atol=far * near)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        *((DELTA, sizes) for sizes in (*SIZES, [64, 33])),
        (FEW, SIZES[0]),
        (FEW._replace(lower_bound=-5.0), SIZES[1]),
        (FEW, [63, 33]),
        (MAMBA, [64, 17, 8, 1]),
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
    near = rtol = 1e-5 if given.inputs.rows.dtype == torch.float32 else 1e-2
    if isinstance(given.gates, SelectiveGates):
        # Along a chain outputs cancel out, so the largest one tells how exact they are.
        near, rtol = near * float(expected.abs().max()), 0
    torch.testing.assert_close(found.float().cpu(), expected, rtol=rtol, atol=near)


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
        assert not torch.equal(after[column], before[column])
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
    strong = KeyDecays(decays.to(DEVICE), gates.betas, *zeros, None)
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
