"""Delta rules and Mamba-2's update over trees, by rows and by chunks, equal plain loops.

On chains they equal vLLM's own kernels.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.support.crossed import crossed
from tests.support.references.recurrence_reference import path_to
from tests.support.samples.kept_inputs import Kept, check_folded_bits, chunk, fold
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Gates,
    Heads,
    Rule,
    alone,
    copied,
    deepest,
    gates_of,
    key_decays_of,
    of_rows,
    on_cpu,
    random,
    rows_of,
    states_of,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import (
    KeptRows,
    KeyDecays,
    RecurrentRows,
    keep_rows,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.state_folds import FoldTable

SIZES, KINDS = [[1], [9, 1, 32, 4]], ["random", "chain", "star"]
DELTA, KEYS = Rule(Heads()), Rule(Heads(2, 2, 16, 16), by_key=True)
BOUNDED = KEYS._replace(lower_bound=-5.0)
MAMBA = Rule(Heads(2, 4, 16, 24), selective=True)
BOTH, ALL = pytest.mark.parametrize("rule", [DELTA, KEYS]), [DELTA, KEYS, BOUNDED]
OF_EACH_KIND = pytest.mark.parametrize("rule", [DELTA, KEYS, MAMBA])
CHAIN = torch.arange(-1, 8, dtype=torch.int32, device=DEVICE)


def run(
    rule: Rule,
    rows: RecurrentRows,
    states: torch.Tensor,
    inputs: torch.Tensor,
    gates: Gates,
) -> torch.Tensor:
    out = torch.zeros(len(inputs), *states.shape[1:3], device=DEVICE, dtype=inputs.dtype)
    tree_recurrence(inputs, gates, states, rows, out, groups=rule.heads.key_heads)
    return out


@pytest.mark.parametrize(
    ("sizes", "kind", "rule"),
    [
        *crossed(
            SIZES,
            KINDS,
            [*ALL, Rule(Heads(1, 3, 16, 40)), Rule(Heads(1, 1, 24, 40), by_key=True)],
            every=3,
        ),
        *product(SIZES, KINDS, [MAMBA]),
    ],
)
def test_equals_a_plain_loop(kind: str, sizes: list[int], rule: Rule) -> None:
    rows, heads = rows_of(sizes, kind, padding=1), rule.heads
    inputs = random(len(rows.parents), heads.dim + 8, seed=6)[:, : heads.dim]
    gates, states = rule.gates(len(inputs)), states_of(rows, heads)
    mine, theirs = copied(states), states.cpu().clone()
    found = run(rule, rows, mine, inputs, gates)
    torch.testing.assert_close(
        found.cpu(), rule.looped(inputs, gates, theirs, rows), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-5, atol=1e-5)
    # The null block and blocks of no row stay as they were.
    used = torch.zeros(len(states), dtype=torch.bool)
    for req, size in enumerate(sizes):
        used[rows.columns[req, :size].long().cpu()] = True
    assert torch.equal(mine.cpu()[~used], states.cpu()[~used])


@pytest.mark.parametrize("rule", [*ALL, MAMBA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["chain", "star"])
def test_a_chain_has_the_bits_of_the_platform_s_kernel(
    kind: str, dtype: torch.dtype, rule: Rule
) -> None:
    """And a tree of other rows has not: the negative control."""
    rows = rows_of([7, 1, 4], kind, padding=1)
    inputs = random(len(rows.parents), rule.heads.dim, seed=6)
    gates, states = rule.gates(len(inputs)), states_of(rows, rule.heads, dtype)
    mine, theirs = copied(states), copied(states)
    found, expected = run(rule, rows, mine, inputs, gates), rule.stock(inputs, gates, theirs, rows)
    if rule.selective:
        # It writes what it computes for padding, too.
        used = int(rows.query_start_loc[-1])
        found, expected, mine, theirs = found[:used], expected[:used], mine[1:], theirs[1:]
    assert torch.equal(found, expected) is (kind == "chain")
    assert torch.equal(mine, theirs) is (kind == "chain")


@BOTH
def test_a_path_has_the_bits_of_a_chain_of_its_rows(rule: Rule) -> None:
    """Each path of a tree, alone in vLLM's kernel."""
    rows = rows_of([12], "random", seed=3)
    inputs = random(12, rule.heads.dim, seed=6)
    gates, states = rule.gates(12), states_of(rows, rule.heads)
    mine = copied(states)
    found = run(rule, rows, mine, inputs, gates)
    for row in range(12):
        path = path_to(on_cpu(rows), 0, row)
        theirs = copied(states)
        expected = rule.stock(inputs[path], of_rows(gates, path), theirs, alone(rows, 0, len(path)))
        assert torch.equal(found[row], expected[-1])
        last = int(rows.columns[0, len(path) - 1])
        assert torch.equal(mine[int(rows.columns[0, row])], theirs[last])


def test_a_level_at_a_time_by_the_platform_s_kernel() -> None:
    """Every row a request of one token, which starts from its parent's column."""
    rows = rows_of([16, 11], "random", seed=5)
    inputs = random(27, DELTA.heads.dim, seed=6)
    gates, states = DELTA.gates(27), states_of(rows, DELTA.heads)
    mine, theirs = copied(states), copied(states)
    found, expected = run(DELTA, rows, mine, inputs, gates), torch.zeros(27, 4, 16, device=DEVICE)
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
        out = DELTA.stock(inputs, gates, theirs, chains)
        here = torch.tensor(depth, device=DEVICE) == level
        expected[here] = out[here]
    assert torch.equal(found, expected)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("chunked", [False, True])
def test_each_key_has_a_decay_of_its_own(chunked: bool) -> None:
    """Negative control: with the mean decay of a head, as the gated delta rule has, all differ."""
    rows = rows_of([9], "random")
    inputs, gates = random(9, KEYS.heads.dim, seed=6), key_decays_of(9, KEYS.heads)
    mean = gates.decays.mean(-1, keepdim=True).expand_as(gates.decays).contiguous()
    found, spoilt = (
        outputs(KEYS, rows, inputs, each, chunked) for each in (gates, gates._replace(decays=mean))
    )
    assert ((found - spoilt).abs().amax((1, 2)) > 0.01).all()


def outputs(
    rule: Rule,
    rows: RecurrentRows,
    inputs: torch.Tensor,
    gates: Gates,
    chunked: bool,
) -> torch.Tensor:
    if chunked:
        return chunk(Kept.of(rows, rule.heads, inputs, gates))
    return run(rule, rows, states_of(rows, rule.heads), inputs, gates)


@OF_EACH_KIND
@pytest.mark.parametrize("chunked", [False, True])
def test_the_row_before_is_not_the_parent(chunked: bool, rule: Rule) -> None:
    """Negative control: with the row before in place of the parent, outputs differ."""
    rows = rows_of([9], "star")
    inputs, gates = random(9, rule.heads.dim, seed=6), rule.gates(9)
    found, spoilt = (
        outputs(rule, each, inputs, gates, chunked) for each in (rows, replace(rows, parents=CHAIN))
    )
    if chunked:
        torch.testing.assert_close(found[:2], spoilt[:2])
    else:
        assert torch.equal(found[:2], spoilt[:2])
    assert ((found[2:] - spoilt[2:]).abs().amax((1, 2)) > 0.01).all()


@OF_EACH_KIND
def test_states_that_are_not_contiguous_are_refused(rule: Rule) -> None:
    rows = rows_of([3], "chain")
    states = states_of(rows, rule.heads).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        run(rule, rows, states, random(3, rule.heads.dim, seed=6), rule.gates(3))


def looped(rule: Rule, given: Kept) -> torch.Tensor:
    return rule.looped(given.inputs.rows, given.gates, given.states.cpu().clone(), given.rows)


@pytest.mark.parametrize(
    ("sizes", "kind", "rule"),
    [
        *crossed(
            [*SIZES, [64, 17]],
            KINDS,
            [*ALL, Rule(Heads(1, 3, 24, 40)), Rule(Heads(1, 1, 40, 24), by_key=True)],
            every=3,
        ),
        *product([*SIZES, [64, 17]], KINDS, [MAMBA]),
    ],
)
def test_outputs_equal_a_plain_loop(kind: str, sizes: list[int], rule: Rule) -> None:
    rows, heads = rows_of(sizes, kind, padding=1), rule.heads
    inputs = random(len(rows.parents), heads.dim + 8, seed=6)[:, : heads.dim]
    given = Kept.of(rows, heads, inputs, rule.gates(len(inputs)))
    before = given.states.clone()
    found, expected = chunk(given), looped(rule, given)
    # Along a chain Mamba's outputs cancel out, so the largest one tells how exact they are.
    near = 1e-5 * (max(1.0, float(expected.abs().max())) if rule.selective else 1.0)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=near)
    # No state is written.
    assert torch.equal(given.states, before)
    if rule.selective:
        used = int(rows.query_start_loc[-1])
        assert torch.equal(given.inputs.gates[:used, 0], given.gates.steps[:used])


def plain(decays: torch.Tensor) -> KeyDecays:
    """Gates whose logarithms of decays are ``-softplus(decays)``."""
    gates = key_decays_of(len(decays), KEYS.heads)
    zeros = [torch.zeros_like(each) for each in (gates.log_rates, gates.decay_bias)]
    return KeyDecays(decays.to(DEVICE), gates.betas, *zeros, None)


def weak_behind_strong() -> torch.Tensor:
    """Decays of 20 for 40 rows, of about 0.03 behind them."""
    decays = torch.full((63, KEYS.heads.value_heads, KEYS.heads.key), 20.0)
    decays[40:] = -3.5
    return decays


@pytest.mark.parametrize("kind", ["random", "chain"])
@pytest.mark.parametrize("what", ["beside", "behind"])
def test_strong_decays_neither_overflow_nor_hide_weak_ones(what: str, kind: str) -> None:
    """Strong and weak decays of keys beside each other, or weak ones behind strong ones."""
    rows = rows_of([63], kind)
    if what == "behind":
        decays = weak_behind_strong()
    else:
        shape = (63, KEYS.heads.value_heads, KEYS.heads.key)
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(3))
        decays = torch.where(drawn < 0.5, 20.0, drawn * 18 - 18)
    given = Kept.of(rows, KEYS.heads, random(63, KEYS.heads.dim, seed=6), plain(decays))
    found = chunk(given)
    assert found.isfinite().all()
    torch.testing.assert_close(found.cpu(), looped(KEYS, given), rtol=1e-5, atol=1e-5)


def test_differences_of_sums_would_lose_digits() -> None:
    """Negative control: why the kernel does not take a sum from the root away from another."""
    logs = -torch.nn.functional.softplus(weak_behind_strong()[:, 0, 0])
    total = logs.cumsum(0)
    between, added = (total[62] - total[45]).exp(), logs[46:].sum().exp()
    assert added > 0.5
    assert abs(between / added - 1) > 1e-5
    assert not (-total[45]).exp().isfinite()


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


@pytest.mark.parametrize(
    ("by_prefix", "dtype", "rule"),
    [
        *crossed([False, True], [torch.float32, torch.bfloat16], ALL, every=3),
        *product([False], [torch.float32, torch.bfloat16], [MAMBA]),
    ],
)
def test_states_have_the_bits_of_a_chain_of_the_path(
    by_prefix: bool, dtype: torch.dtype, rule: Rule
) -> None:
    """Two layers, four requests: paths that are scattered or short, one that left no inputs."""
    rows = rows_of([12, 9, 3, 9], "random", seed=3)
    inputs, gates = random(33, rule.heads.dim, seed=6), rule.gates(33)
    layers = [Kept.of(rows, rule.heads, inputs + layer, gates, dtype=dtype) for layer in (0, 1)]
    check_folded_bits(layers, by_prefix=by_prefix)


def test_a_state_of_other_rows_has_other_bits() -> None:
    """Negative control of the fold: the first rows in place of the path's."""
    rows = rows_of([12], "random", seed=3)
    path = deepest(rows, 0, 12)
    assert path_to(on_cpu(rows), 0, path[-1]) == path
    given = Kept.of(
        rows, KEYS.heads, random(12, KEYS.heads.dim, seed=6), key_decays_of(12, KEYS.heads)
    )
    chunk(given)
    before, found = given.states.clone(), []
    for nodes in (path, list(range(len(path)))):
        given.states.copy_(before)
        fold([given], [nodes])
        found.append(given.states.clone())
    assert not torch.equal(*found)


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
