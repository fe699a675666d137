"""Kernels that move states, and convolutions over trees."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.support.references.recurrence_reference import tree_conv_reference
from tests.support.samples.recurrent_samples import (
    DEVICE,
    Heads,
    gates_of,
    random,
    rows_of,
    stock_chain_conv,
    stock_chain_delta_rule,
)
from vllm_graft.spec_decode.targets.recurrent.kernels.gates import DeltaGates, RecurrentRows
from vllm_graft.spec_decode.targets.recurrent.kernels.recurrence import tree_conv, tree_recurrence
from vllm_graft.spec_decode.targets.recurrent.kernels.state_moves import (
    RecurrentCache,
    StateTable,
    clear_states,
    move_states,
)

WIDTH = 4
PATHS = [[0, 2, 5], [0], [0, 1, 2], [0, 3]]
"""Accepted rows: scattered, the root alone, in a chain already; and of a request without drafts,
whose path does not count."""
DRAFTS = [6, 6, 3, 0]


def step(device: str = DEVICE) -> dict[str, torch.Tensor]:
    path = torch.full((len(PATHS), 7), 99, dtype=torch.int32)
    for req, nodes in enumerate(PATHS):
        path[req, : len(nodes)] = torch.tensor(nodes)
    counts = [len(nodes) for nodes in PATHS]
    tensors = {
        "path": path,
        "num_sampled": torch.tensor(counts),
        "num_drafts": torch.tensor(DRAFTS),
    }
    # Rows 1 to 7 of the second block, and so on.
    tensors["seq_lens"] = torch.tensor([23, 8, 16, 17])
    return {name: tensor.to(device, torch.int32) for name, tensor in tensors.items()}


def caches(
    layers: int, dtype: torch.dtype, *, dim_first: bool, block_size: int
) -> list[RecurrentCache]:
    """Layers of two groups, whose requests have their columns in other blocks."""
    found = []
    tables = [
        (torch.randperm(40, generator=torch.Generator().manual_seed(group)) + 1)
        .view(4, 10)
        .to(DEVICE, torch.int32)
        for group in (0, 1)
    ]
    for layer in range(layers):
        shape = (41, 24, 9) if dim_first else (41, 9, 24)
        windows = random(*shape, seed=layer, dtype=torch.bfloat16)
        windows = windows if dim_first else windows.transpose(1, 2)
        pages = random(41, 3 * 8 * 8 + 24, seed=50 + layer, dtype=dtype)
        states = pages[:, : 3 * 8 * 8].unflatten(1, (3, 8, 8))
        found.append(RecurrentCache(windows, states, WIDTH, tables[layer % 2], block_size))
    return found


@pytest.mark.parametrize("by_prefix", [False, True])
@pytest.mark.parametrize(("dtype", "dim_first"), [(torch.float32, False), (torch.bfloat16, True)])
def test_equals_a_plain_loop(dtype: torch.dtype, dim_first: bool, by_prefix: bool) -> None:
    given = caches(3, dtype, dim_first=dim_first, block_size=8)
    expected = [(each.windows.clone(), each.states.clone()) for each in given]
    numbers = step()
    lens = numbers["seq_lens"].tolist()
    for cache, (windows, states) in zip(given, expected):
        for req, nodes in enumerate(PATHS):
            first = (lens[req] - 1) // 8 if by_prefix else 0
            columns = cache.blocks[req, first:].tolist()
            if not DRAFTS[req]:
                continue
            for d, node in enumerate(nodes):
                window = windows[columns[0]]
                window[:, WIDTH - 2 + d] = window[:, WIDTH - 2 + node]
                if by_prefix or d == len(nodes) - 1:
                    states[columns[d]] = states[columns[node]]
    before = [(each.windows.clone(), each.states.clone()) for each in given]
    move_states(StateTable.build(given, by_prefix=by_prefix), **numbers, num_reqs=4)
    for cache, (windows, states), (old_windows, old_states) in zip(given, expected, before):
        assert torch.equal(cache.windows, windows)
        assert torch.equal(cache.states, states)
        # Something has moved.
        assert not torch.equal(windows, old_windows)
        assert not torch.equal(states, old_states)


def test_null_blocks_are_left_alone() -> None:
    [cache] = caches(1, torch.float32, dim_first=False, block_size=8)
    cache.blocks.zero_()
    before = cache.states.clone(), cache.windows.clone()
    move_states(StateTable.build([cache], by_prefix=False), **step(), num_reqs=4)
    assert torch.equal(cache.states, before[0])
    assert torch.equal(cache.windows, before[1])


@pytest.mark.parametrize("commit", [True, False])
def test_the_next_step_goes_on_as_after_a_chain(commit: bool) -> None:
    """Commit a path, then verify again; the oracle is vLLM's kernels on the path's rows alone."""
    heads = Heads()
    rows = rows_of([9], "random", seed=8)
    parents, path = rows.parents.tolist(), [8]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    assert path != list(range(len(path)))
    blocks = int(rows.columns.max()) + 1
    windows = random(blocks, WIDTH - 2 + 9, heads.dim, seed=1).transpose(1, 2)
    states = random(blocks, 4, 16, 16, seed=2)
    weights, inputs = random(heads.dim, WIDTH, seed=3), random(9, heads.dim, seed=6)
    gates = gates_of(9, heads)
    mine, theirs = (windows.clone(), states.clone()), (windows.clone(), states.clone())
    mixed = tree_conv(inputs, mine[0], weights, None, rows, silu=True)
    out = torch.zeros(9, 4, 16, device=DEVICE)
    tree_recurrence(mixed, gates, mine[1], rows, out, groups=2)

    def chain(number: int, accepted: torch.Tensor):
        return replace(
            rows,
            parents=torch.arange(-1, number - 1, dtype=torch.int32, device=DEVICE),
            query_start_loc=torch.tensor([0, number], dtype=torch.int32, device=DEVICE),
            num_accepted=accepted,
        )

    alone = chain(len(path), rows.num_accepted)
    chosen = DeltaGates(gates.decays[path], gates.betas[path], *gates[2:])
    expected = stock_chain_conv(inputs[path], theirs[0], weights, None, alone)
    stock_chain_delta_rule(expected, chosen, theirs[1], alone, heads)
    if commit:
        cache = RecurrentCache(mine[0], mine[1], WIDTH, rows.columns, 0)
        numbers = {"path": path, "num_sampled": [len(path)], "num_drafts": [8], "seq_lens": [20]}
        given = {k: torch.tensor(v, dtype=torch.int32, device=DEVICE) for k, v in numbers.items()}
        given["path"] = given["path"][None]
        move_states(StateTable.build([cache], by_prefix=False), **given, num_reqs=1)
    accepted = torch.tensor([len(path)], dtype=torch.int32, device=DEVICE)
    after, more, gates = chain(3, accepted), random(3, heads.dim, seed=9), gates_of(3, heads)
    results = []
    for cache in (mine, theirs):
        mixed = stock_chain_conv(more, cache[0], weights, None, after)
        results.append((mixed, stock_chain_delta_rule(mixed, gates, cache[1], after, heads)))
    for found, wanted in zip(*results):
        assert torch.equal(found, wanted) is commit


def test_layers_of_other_sizes_are_refused() -> None:
    one, two = caches(2, torch.float32, dim_first=False, block_size=8)
    with pytest.raises(ValueError, match="one size"):
        StateTable.build([one, two._replace(states=two.states[:, :2])], by_prefix=False)


@pytest.mark.parametrize("by_prefix", [False, True])
def test_a_request_starts_from_zeros(by_prefix: bool) -> None:
    given = caches(2, torch.float32, dim_first=True, block_size=8)
    before = [(each.windows.clone(), each.states.clone()) for each in given]
    clear_states(given, 2, step()["seq_lens"], by_prefix=by_prefix)
    for cache, (windows, states) in zip(given, before):
        # The request has 16 tokens: its last one is in the second block of the table.
        block = int(cache.blocks[2, 1 if by_prefix else 0])
        assert not cache.windows[block].any()
        assert not cache.states[block].any()
        others = torch.arange(41, device=DEVICE) != block
        assert torch.equal(cache.windows[others], windows[others])
        assert torch.equal(cache.states[others], states[others])


DIM = 24


def problem(
    rows: RecurrentRows, width: int = 4, *, dim_first: bool = False, bias: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    blocks, slots = int(rows.columns.max()) + 1, width - 2 + rows.columns.shape[1]
    shape = (blocks, DIM, slots) if dim_first else (blocks, slots, DIM)
    windows = random(*shape, seed=1)
    windows = windows if dim_first else windows.transpose(1, 2)
    # Queries, keys and values are a part of a wider projection.
    inputs = random(len(rows.parents) + 2, DIM + 8, seed=2)[:, :DIM]
    return inputs, windows, random(DIM, width, seed=3), random(DIM, seed=4) if bias else None


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("kind", ["random", "chain", "star"])
@pytest.mark.parametrize("sizes", [[1], [9, 1, 32, 4]])
def test_a_convolution_equals_a_plain_loop(kind: str, sizes: list[int], width: int) -> None:
    rows = rows_of(sizes, kind, padding=1)
    # A window begins where the last accepted row left it, and holds no more than a step's rows.
    inputs, windows, weights, bias = problem(rows, width)
    mine = windows.clone()
    found = tree_conv(inputs, mine, weights, bias, rows, silu=True)
    cpu = copy.copy(rows)
    cpu = replace(cpu, **{k: v.cpu() for k, v in vars(rows).items() if k != "num_reqs"})
    theirs = windows.cpu().clone()
    expected = tree_conv_reference(
        inputs.cpu(), theirs, weights.cpu(), None if bias is None else bias.cpu(), cpu, silu=True
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("dim_first", [False, True])
def test_a_chain_has_the_bits_of_the_platform_s_kernel(dim_first: bool) -> None:
    rows = rows_of([7, 1, 4], "chain", padding=1)
    inputs, windows, weights, bias = problem(rows, dim_first=dim_first)
    mine, theirs = windows.clone(), windows.clone()
    found = tree_conv(inputs, mine, weights, bias, rows, silu=True)
    expected = stock_chain_conv(inputs, theirs, weights, bias, rows)
    used = len(rows.parents)
    assert torch.equal(found[:used], expected[:used])
    assert torch.equal(mine, theirs)
    assert not found[used:].any()


def test_without_a_bias_and_without_silu() -> None:
    rows = rows_of([5], "random")
    inputs, windows, weights, _ = problem(rows)
    zeros = torch.zeros(DIM, device=DEVICE)
    found = tree_conv(inputs, windows.clone(), weights, None, rows, silu=False)
    assert torch.equal(found, tree_conv(inputs, windows.clone(), weights, zeros, rows, silu=False))
    silu = tree_conv(inputs, windows.clone(), weights, None, rows, silu=True)
    torch.testing.assert_close(silu, torch.nn.functional.silu(found))


def test_rows_before_a_row_are_no_ancestors() -> None:
    """Negative control: as a chain the rows of a tree come out otherwise."""
    rows = rows_of([9], "star")
    inputs, windows, weights, bias = problem(rows)
    found = tree_conv(inputs, windows.clone(), weights, bias, rows, silu=True)
    chain = torch.arange(-1, 8, dtype=torch.int32, device=DEVICE)
    spoilt = tree_conv(
        inputs, windows.clone(), weights, bias, replace(rows, parents=chain), silu=True
    )
    assert torch.equal(found[:2], spoilt[:2])
    assert ((found[2:9] - spoilt[2:9]).abs().amax(1) > 0.01).all()
