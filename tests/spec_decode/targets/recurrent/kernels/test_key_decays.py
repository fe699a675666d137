"""The delta rule with decays per key over trees equals a plain loop, and on a chain vLLM's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import path_to, tree_key_decays_reference
from tests.support.samples.kept_inputs import Kept, check_folded_bits, chunk, fold
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Heads,
    alone,
    copied,
    deepest,
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


CHUNK_SIZES = [[1], [9, 1, 32, 4], [63, 17]]


def looped(given: Kept) -> torch.Tensor:
    """The outputs of a plain loop in float32."""
    assert isinstance(given.gates, KeyDecays)
    *tensors, lower_bound = given.gates
    return tree_key_decays_reference(
        given.inputs.rows.cpu(),
        KeyDecays(*(gate.cpu() for gate in tensors), lower_bound),
        given.states.cpu().clone(),
        on_cpu(given.rows),
    )


@pytest.mark.parametrize(
    ("heads", "lower_bound"), [(HEADS, None), (HEADS, -5.0), (Heads(1, 1, 40, 24), None)]
)
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", CHUNK_SIZES)
def test_outputs_equal_a_plain_loop(
    kind: str, sizes: list[int], heads: Heads, lower_bound: float | None
) -> None:
    rows = rows_of(sizes, kind, padding=1)
    inputs = random(len(rows.parents), heads.dim + 8, seed=6)[:, : heads.dim]
    gates = key_decays_of(len(inputs), heads, lower_bound=lower_bound)
    given = Kept.of(rows, heads, inputs, gates)
    before = given.states.clone()
    found = chunk(given)
    torch.testing.assert_close(found.cpu(), looped(given), rtol=1e-5, atol=1e-5)
    # No state is written.
    assert torch.equal(given.states, before)


def plain(decays: torch.Tensor) -> KeyDecays:
    """Gates whose logarithms of decays are ``-softplus(decays)``."""
    gates = key_decays_of(len(decays), HEADS)
    zeros = [torch.zeros_like(each) for each in (gates.log_rates, gates.decay_bias)]
    return KeyDecays(decays.to(DEVICE), gates.betas, *zeros, None)


def weak_behind_strong() -> torch.Tensor:
    """Decays of 20 for 40 rows, of about 0.03 behind them."""
    decays = torch.full((63, HEADS.value_heads, HEADS.key), 20.0)
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
        shape = (63, HEADS.value_heads, HEADS.key)
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(3))
        decays = torch.where(drawn < 0.5, 20.0, drawn * 18 - 18)
    given = Kept.of(rows, HEADS, random(63, HEADS.dim, seed=6), plain(decays))
    found = chunk(given)
    assert found.isfinite().all()
    torch.testing.assert_close(found.cpu(), looped(given), rtol=1e-5, atol=1e-5)


def test_differences_of_sums_would_lose_digits() -> None:
    """Negative control: why the kernel does not take a sum from the root away from another."""
    logs = -torch.nn.functional.softplus(weak_behind_strong()[:, 0, 0])
    total = logs.cumsum(0)
    between, added = (total[62] - total[45]).exp(), logs[46:].sum().exp()
    assert added > 0.5
    assert abs(between / added - 1) > 1e-5
    assert not (-total[45]).exp().isfinite()


def test_each_key_of_a_chunk_has_a_decay_of_its_own() -> None:
    """Negative control: with the mean decay of a head, as the gated delta rule has, all differ."""
    rows = rows_of([9], "random")
    inputs, gates = random(9, HEADS.dim, seed=6), key_decays_of(9, HEADS)
    mean = gates.decays.mean(-1, keepdim=True).expand_as(gates.decays).contiguous()
    found, spoilt = (
        chunk(Kept.of(rows, HEADS, inputs, each)) for each in (gates, gates._replace(decays=mean))
    )
    assert ((found - spoilt).abs().amax((1, 2)) > 0.01).all()


def test_the_row_before_in_a_chunk_is_not_the_parent() -> None:
    """Negative control: with the row before in place of the parent, outputs differ."""
    rows = rows_of([9], "star")
    inputs, gates = random(9, HEADS.dim, seed=6), key_decays_of(9, HEADS)
    chain = replace(rows, parents=torch.arange(-1, 8, dtype=torch.int32, device=DEVICE))
    found, spoilt = (chunk(Kept.of(each, HEADS, inputs, gates)) for each in (rows, chain))
    torch.testing.assert_close(found[:2], spoilt[:2])
    assert ((found[2:] - spoilt[2:]).abs().amax((1, 2)) > 0.01).all()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_prefix", [False, True])
def test_states_have_the_bits_of_a_chain_of_the_path(
    by_prefix: bool, dtype: torch.dtype, lower_bound: float | None
) -> None:
    """Two layers, four requests: paths that are scattered or short, one that left no inputs."""
    rows = rows_of([12, 9, 3, 9], "random", seed=3)
    inputs = random(33, HEADS.dim, seed=6)
    gates = key_decays_of(33, HEADS, lower_bound=lower_bound)
    layers = [Kept.of(rows, HEADS, inputs + layer, gates, dtype=dtype) for layer in (0, 1)]
    check_folded_bits(layers, by_prefix=by_prefix)


def test_a_state_of_other_rows_has_other_bits() -> None:
    """Negative control of the fold: the first rows in place of the path's."""
    rows = rows_of([12], "random", seed=3)
    path = deepest(rows, 0, 12)
    assert path_to(on_cpu(rows), 0, path[-1]) == path
    given = Kept.of(rows, HEADS, random(12, HEADS.dim, seed=6), key_decays_of(12, HEADS))
    chunk(given)
    before, found = given.states.clone(), []
    for nodes in (path, list(range(len(path)))):
        given.states.copy_(before)
        fold([given], [nodes])
        found.append(given.states.clone())
    assert not torch.equal(*found)
